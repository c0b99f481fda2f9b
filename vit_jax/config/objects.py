"""Models, tasks and evaluators made from the sections of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import defaults, schema
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.tasks.base import Task


def model_and_task(config: ConfigDict) -> tuple[Any, Task]:
    """The model and the task of a config.

    Raises:
      UserError: if a constructor rejects its keywords.
    """
    return make_model(config), make_task(config)


def make_model(config: ConfigDict) -> Any:
    """The Linen module of `config.model`; raises UserError if it rejects its keywords."""
    return _make(schema.model_class(config), config, 'model')


def make_task(config: ConfigDict) -> Task:
    """The task of `config.task`; raises UserError if it rejects its keywords."""
    return _make(schema.task_class(config), config, 'task')


def _make(cls: Callable[..., Any], config: ConfigDict, kind: str) -> Any:
    try:
        return cls(**defaults.keywords(config[kind]))
    except TypeError as e:
        raise UserError(f'config.{kind}: {e}') from e


def make_evaluator(section: ConfigDict, where: str) -> base.Evaluator | None:
    """The evaluator of an entry of `config.evals`; None if the task evaluates it.

    Raises:
      UserError: for an unknown evaluator or key, an invalid value, or a missing `fit` split of an
        evaluator that learns.
    """
    schema.check_group(section, where)
    schema.check(section, schema.entry_parameters(section), where)
    if not section.get('evaluator'):
        return None
    cls = schema.evaluator_class(section.evaluator)
    if cls.learns and not section.get('fit'):
        raise UserError(f"{where}: name the split to learn from, as fit='train'")
    own = schema.constructor_keys(cls)
    try:
        return cls(**{k: v for k, v in defaults.keywords(section).items() if k in own})
    except (TypeError, UserError) as e:
        raise UserError(f'{where}: {e}') from e


def headline(config: ConfigDict, section: ConfigDict) -> tuple[str, ...]:
    """The metrics of an entry of `config.evals` to print in one line; empty for all."""
    if section.get('evaluator'):
        return schema.evaluator_class(section.evaluator).headline
    return schema.task_class(config).headline
