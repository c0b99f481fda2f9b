"""What the names in a config stand for, and the objects that its sections make."""

from __future__ import annotations

import inspect
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config.sections import check_data, keywords
from vit_jax.errors import UserError, resolve
from vit_jax.evaluators import base


def model_class(config: ConfigDict) -> Any:
    """The Linen module class that `config.model.name` stands for."""
    return resolve('vit_jax.models', config.model.name, 'Model')


def task_class(config: ConfigDict) -> Any:
    """The task dataclass that `config.task.name` stands for."""
    return resolve('vit_jax.tasks', config.task.name, 'Task')


def evaluator_class(name: str) -> type[base.Evaluator]:
    """The class that `name`, an entry's `evaluator`, stands for.

    Raises:
      UserError: if there is none, or it is not derived from `base.Evaluator`.
    """
    found = resolve('vit_jax.evaluators', name, 'Evaluator')
    if not (isinstance(found, type) and issubclass(found, base.Evaluator)):
        raise UserError(
            f'evaluator name {name!r}: its Evaluator must be derived from {base.__name__}.Evaluator'
        )
    return found


def model_and_task(config: ConfigDict) -> tuple[Any, Any]:
    """The model and the task of a config.

    Raises:
      UserError: if a constructor refuses its keywords.
    """
    made = []
    for kind, cls in (('model', model_class(config)), ('task', task_class(config))):
        try:
            made.append(cls(**keywords(config[kind])))
        except TypeError as e:
            raise UserError(f'config.{kind}: {e}') from e
    return made[0], made[1]


def make_evaluator(section: ConfigDict, where: str) -> base.Evaluator | None:
    """The evaluator of an entry of `config.evals`; None where the task evaluates it.

    Raises:
      UserError: no such evaluator, a key that is not known or has a value that cannot be, or
        no `fit` split for an evaluator that learns.
    """
    if 'evaluator' not in section:
        check_data(section, where, ['batch_size', 'every'])
        return None
    cls = evaluator_class(section.evaluator)
    own = set(inspect.signature(cls).parameters)
    fit = ['fit'] if cls.learns else []
    check_data(section, where, ['batch_size', 'every', 'evaluator', *fit, *own])
    if fit and 'fit' not in section:
        raise UserError(f"{where}: name the split to learn from, as fit='train'")
    try:
        return cls(**{k: v for k, v in keywords(section).items() if k in own})
    except (TypeError, UserError) as e:
        raise UserError(f'{where}: {e}') from e
