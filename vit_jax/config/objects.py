"""Models, tasks, evaluators and writers that a config names, found and made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.config.run import Evaluation, Model, Task
from vit_jax.errors import UserError, resolve
from vit_jax.evaluators import base as evaluators
from vit_jax.writers import base as writers

if TYPE_CHECKING:
    from vit_jax.models import base as models
    from vit_jax.tasks import base as tasks


def model_class(name: str | None) -> type[models.Model]:
    """Return a model's Linen class; raise UserError if missing or not a `Model`."""
    from vit_jax.models import base  # here, since it imports JAX

    return _find(name, base.Model)


def task_class(name: str) -> type[tasks.Task]:
    """Return the dataclass of a task; UserError if it does not exist or is none of `Task`."""
    from vit_jax.tasks import base

    return _find(name, base.Task)


def evaluator_class(name: str) -> type[evaluators.Evaluator]:
    """Return an evaluator's class; raise UserError if missing or not an `Evaluator`."""
    return _find(name, evaluators.Evaluator)


def writer_class(name: str) -> type[writers.Writer]:
    """Return the class of a writer; UserError if it does not exist or is none of `Writer`."""
    return _find(name, writers.Writer)


def _find(name: str | None, base: type) -> Any:
    """Find the class derived from `base` in a module of its package, or in one of the user's."""
    cls = resolve(base.__module__.rpartition('.')[0], str(name), base.__name__)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(
            f'{base.__name__.lower()} name {name!r}: its {base.__name__} must be derived from '
            f'{base.__module__}.{base.__name__}'
        )
    return cls


def make_model(model: Model) -> Any:
    """Build the module of `config.model`; raise UserError if its class rejects an option."""
    try:
        return model_class(model.name)(**model.options)
    except TypeError as e:
        raise UserError(f'config.model: {e}') from e


def make_task(task: Task) -> tasks.Task:
    """Return the task of `config.task`; raises UserError if its class rejects an option."""
    try:
        return task_class(task.name)(**task.options)
    except TypeError as e:
        raise UserError(f'config.task: {e}') from e


def merge_fields(name: str, *fields: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields of a model, flat or nested; later ones replace earlier ones key by key."""
    from vit_jax.nn import options

    return options.regroup(model_class(name), *fields)


def place_field(name: str, field: str, value: Any) -> list[tuple[str, Any]]:
    """Locate a field of a model in its groups, see `nn.options.place`."""
    from vit_jax.nn import options

    return options.place(model_class(name), field, value)


def make_evaluator(entry: Evaluation, key: str) -> evaluators.Evaluator | None:
    """Return the evaluator of an entry of `config.evals`; None if the task evaluates it.

    Raises:
      UserError: for an unknown evaluator, an invalid value, or a missing `fit` split of an
        evaluator that learns; begins with `key`.
    """
    if not entry.evaluator:
        return None
    cls = evaluator_class(entry.evaluator)
    if cls.learns and not entry.fit:
        raise UserError(f"{key}: name the split to learn from, as fit='train'")
    try:
        return cls(**entry.options)
    except (TypeError, UserError) as e:
        raise UserError(f'{key}: {e}') from e


def headline(entry: Evaluation, task: Task) -> tuple[str, ...]:
    """Return the metrics of an entry of `config.evals` to print in one line; empty for all."""
    cls = evaluator_class(entry.evaluator) if entry.evaluator else task_class(task.name)
    return cls.headline
