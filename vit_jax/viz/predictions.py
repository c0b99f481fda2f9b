"""Lookup of the `Viz` of a task by the task's name.

The task `foo` is shown by the class `Viz` of the module `vit_jax.viz.foo`, a user's task
`my_lab.tasks.foo` by `Viz` of `my_lab.viz.foo`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.viz.base import Viz

# {prediction key: its columns in tables}; a box is in pixels of the file.
BOX_COLUMNS = {'bbox': ('x', 'y', 'width', 'height')}


def find_viz(task: str) -> Viz:
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


def table_rows(
    image: str, rows: Sequence[Mapping[str, Any]], *, one_row: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of an image in a table, with ranks from 1, or all of them in one row.

    Args:
      image: name of the image.
      rows: its predictions, as returned by `Viz.rows`.
      one_row: whether the columns of the second prediction are named `NAME_2`, and so on.
    """
    flat_rows = [_with_box_columns(row) for row in rows]
    if not one_row:
        ranked = [{'image': image, 'rank': rank, **row} for rank, row in enumerate(flat_rows, 1)]
        return ranked or [{'image': image}]
    row = {'image': image}
    for rank, cells in enumerate(flat_rows, 1):
        row |= {f'{name}_{rank}': value for name, value in cells.items()}
    return [row]


def _with_box_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if columns := BOX_COLUMNS.get(name):
            cells |= dict(zip(columns, value, strict=True))
        else:
            cells[name] = value
    return cells


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
