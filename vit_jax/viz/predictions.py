"""Lookup of the `Viz` of a task by the task's name.

The task `foo` is shown by the class `Viz` of the module `vit_jax.viz.foo`, a user's task
`my_lab.tasks.foo` by `Viz` of `my_lab.viz.foo`.
"""

from __future__ import annotations

import importlib
import importlib.util

from vit_jax.errors import UserError
from vit_jax.viz.base import Viz


def find(task: str) -> Viz:
    """Return the `Viz` of a task; the default one if the task has no module.

    Args:
      task: Task name, `config.task.name`.

    Raises:
      UserError: if the module has no class `Viz`.
    """
    return _make(module_path(task)) if _exists(task) else Viz()


def require(task: str) -> Viz:
    """Return the `Viz` of a task.

    Raises:
      UserError: if the task has no module, or its module has no class `Viz`.
    """
    path = module_path(task)
    if not _exists(task):
        raise UserError(
            f'predictions of task {task!r} cannot be shown: there is no module {path!r}'
        )
    return _make(path)


def module_path(task: str) -> str:
    """Return the name of the module that visualizes a task.

    Raises:
      UserError: if the task is not in a package named `tasks`.
    """
    package, _, name = task.rpartition('.')
    if not package:
        return f'vit_jax.viz.{name}'
    home, _, room = package.rpartition('.')
    if room != 'tasks':
        raise UserError(
            f'task {task!r}: to show predictions, put the task into a package named tasks, such as '
            "'my_lab.tasks.foo', and its visualization into 'my_lab.viz.foo'"
        )
    return f'{home}.viz.{name}' if home else f'viz.{name}'


def _exists(task: str) -> bool:
    try:
        return importlib.util.find_spec(module_path(task)) is not None
    except (ModuleNotFoundError, UserError):
        return False


def _make(path: str) -> Viz:
    viz_class = vars(importlib.import_module(path)).get('Viz')
    if not (isinstance(viz_class, type) and issubclass(viz_class, Viz)):
        raise UserError(
            f'the module {path!r} has no class Viz: write `class Viz(vit_jax.viz.base.Viz)` with '
            'methods such as rows and draw'
        )
    return viz_class()
