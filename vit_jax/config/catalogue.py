"""Everything that a config may name, with the first line of its docstring.

Nothing is registered: names are those of the existing files and functions. Modules are imported
when they are needed, since some import JAX.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from vit_jax.config import load, shipped
from vit_jax.errors import UserError, modules


@dataclasses.dataclass(frozen=True)
class Named:
    """Something that a config, or the command line, may name.

    Attributes:
      name: as written there; an experiment's is its file.
      line: its description.
      arguments: that it takes, as text; empty if there are none.
    """

    name: str
    line: str
    arguments: str = ''


def modules_of(package: str) -> list[Named]:
    """The modules of a package; their files are read, not imported."""
    (folder,) = importlib.import_module(package).__path__
    files = {name: pathlib.Path(folder) / name for name in modules(package)}
    return [Named(name, _line_of_file(_source_of(path))) for name, path in files.items()]


def transforms() -> list[Named]:
    """The functions that `config.data.transforms` may name, with their arguments."""
    from vit_jax.data.transforms import registry

    found = sorted(registry.plain().items())
    return [Named(name, first_line(f), _signature(f)) for name, f in found]


def optimizers() -> list[Named]:
    """Valid values of `config.optim.name`."""
    from vit_jax.optim import make

    return [Named(name, first_line(make.factory(name))) for name in make.optimizers()]


def schedules() -> list[Named]:
    """Valid values of `config.optim.schedule.name`."""
    from vit_jax.optim import schedules

    return [Named(name, first_line(shape)) for name, shape in schedules.SHAPES.items()]


def experiments(folder: pathlib.Path | None = None) -> list[Named]:
    """The config files below a folder and the arguments that they take; each file is executed.

    By default those that come with the package, under names that `--config` accepts.

    Raises:
      UserError: if there is no such folder, or a file that is no Python.
    """
    if folder is None:
        inside = experiments(shipped.FOLDER)
        return [
            dataclasses.replace(
                named, name=shipped.name_of(named.name.removeprefix(f'{shipped.FOLDER}/'))
            )
            for named in inside
        ]
    if not folder.is_dir():
        raise UserError(f'no folder {str(folder)!r} of experiments')
    files = [p for p in sorted(folder.rglob('*.py')) if 'def get_config(' in p.read_text()]
    return [Named(str(path), _line_of_file(path), _arguments(path)) for path in files]


def first_line(thing: Any) -> str:
    """The first line of a docstring; empty without one."""
    return (inspect.getdoc(thing) or '').partition('\n')[0]


def _signature(function: Callable) -> str:
    """`(size, method='bilinear')`: the arguments that a config may give, without annotations."""
    known = inspect.signature(function).parameters.values()
    given = [p.replace(annotation=p.empty) for p in known if p.kind is not p.KEYWORD_ONLY]
    return str(inspect.Signature(given))


def _arguments(path: pathlib.Path) -> str:
    """The arguments that an experiment lists; `...` if it accepts and checks others as well."""
    found = getattr(load.module_of(str(path), str(path)), 'ARGS', ())
    return ' '.join('...' if arg is ... else arg for arg in found)


def _line_of_file(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or '').partition('\n')[0]


def _source_of(path: pathlib.Path) -> pathlib.Path:
    """The file of a module or of a package."""
    return path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
