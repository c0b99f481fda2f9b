"""Names that a config or the command line may give, with descriptions, for `list`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from vit_jax.commands._parser import find_parser
from vit_jax.config import recipes
from vit_jax.errors import UserError, modules

# What the files below experiments/ define: a config for `train`, a sweep for `sweep create`.
FILE_FUNCTIONS = ('get_config', 'get_sweep')


@dataclasses.dataclass(frozen=True)
class Named:
    """Entry that a config or the command line may name.

    Attributes:
      name: Name as written there; the file of an experiment.
      line: Description.
      arguments: Arguments as text; empty for none.
    """

    name: str
    line: str
    arguments: str = ''


@dataclasses.dataclass(frozen=True)
class Experiment(Named):
    """File below `experiments/`.

    Attributes:
      functions: Names of `FILE_FUNCTIONS` that it defines.
    """

    functions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Command(Named):
    """Command, or an action of a command.

    Attributes:
      flags: (notation, meaning) of each argument, such as `('--steps STEPS', 'number of ...')`.
    """

    flags: tuple[tuple[str, str], ...] = ()


def list_modules(package: str) -> list[Named]:
    """List the modules of a package without importing them."""
    (folder,) = importlib.import_module(package).__path__
    files = {name: pathlib.Path(folder) / name for name in modules(package)}
    return [Named(name, _line_of_file(_source_of(path))) for name, path in files.items()]


def transforms() -> list[Named]:
    """List the functions for `config.data.transforms`, with their arguments."""
    from vit_jax.data.transforms import registry

    functions = map(registry.find_function, sorted(registry.modules()))
    return [Named(f.__name__, first_line(f), _signature(f)) for f in functions]


def optimizers() -> list[Named]:
    """List the valid values of `config.optim.name`."""
    from vit_jax.optim import make

    return [Named(name, first_line(make.factory(name))) for name in make.optimizers()]


def schedules() -> list[Named]:
    """List the valid values of `config.optim.schedule.name`."""
    from vit_jax.optim import schedules

    return [Named(name, first_line(shape)) for name, shape in schedules.SHAPES.items()]


def list_commands() -> list[Command]:
    """List commands and their actions, each with its arguments."""
    from vit_jax.__main__ import command_lines

    commands = []
    for name, line in command_lines().items():
        module = importlib.import_module(f'vit_jax.commands.{name}')
        for action in getattr(module, 'ACTIONS', ('',)):
            parser = find_parser(name, action)
            text = (parser.description or '').partition('\n')[0] if action else line
            commands.append(Command(parser.command, text, flags=tuple(parser.flags())))
    return commands


def experiments(folder: pathlib.Path | None = None) -> list[Experiment]:
    """List the configs and sweeps below a folder and their arguments; each file is executed.

    The default is the package's folder, with the names that `--config` and `sweep create` accept.

    Raises:
      UserError: The folder does not exist, or a file is not Python.
    """
    if folder is None:
        recipes_inside = experiments(recipes.FOLDER)
        return [
            dataclasses.replace(
                named, name=recipes.experiment_name(named.name.removeprefix(f'{recipes.FOLDER}/'))
            )
            for named in recipes_inside
        ]
    if not folder.is_dir():
        raise UserError(f'--folder {str(folder)!r} does not exist')
    defined = {path: _file_functions(path) for path in sorted(folder.rglob('*.py'))}
    return [
        Experiment(str(path), _line_of_file(path), _arguments(path), functions)
        for path, functions in defined.items()
        if functions
    ]


def first_line(documented: Any) -> str:
    """Read the first line of a docstring; empty without one."""
    return (inspect.getdoc(documented) or '').partition('\n')[0]


def _signature(function: Callable) -> str:
    """Format the arguments that a config may give, such as `(size, method='bilinear')`."""
    parameters = inspect.signature(function).parameters.values()
    settable = [p.replace(annotation=p.empty) for p in parameters if p.name != 'vocab']
    return str(inspect.Signature(settable))


def _arguments(path: pathlib.Path) -> str:
    """Format the arguments of an experiment with their defaults or choices."""
    return ' '.join(recipes.arguments(recipes.load_module(str(path), str(path))))


def _file_functions(path: pathlib.Path) -> tuple[str, ...]:
    text = path.read_text()
    return tuple(name for name in FILE_FUNCTIONS if f'def {name}(' in text)


def _line_of_file(path: pathlib.Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or '').partition('\n')[0]


def _source_of(path: pathlib.Path) -> pathlib.Path:
    """Find the file of a module or of a package."""
    return path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
