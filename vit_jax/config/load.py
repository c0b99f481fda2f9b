"""Loading of a config file with flags into a checked config.

A config is a Python file with `get_config(arg: str | None) -> ConfigDict`; every
sub-dict holds the keywords of the constructor that it is passed to. The file may list the valid
values of `arg` in `ARGS`; if `...` is among them, they are examples and the file checks `arg`
itself. Loading the file executes it. The resolved config is stored in the run folder as JSON;
every later command reads that, and it is never executed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import json
import pathlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import flags, schema, shipped
from vit_jax.config.validate import validate
from vit_jax.errors import Unfit, UserError, hide, nearest
from vit_jax.signatures import keyword_only
from vit_jax.storage import paths

# Renamed keys. Configs with the old names still load.
RENAMED = {'parallel.small': 'parallel.min_split_size'}


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Runs `FILE[:arg]`, or an experiment such as `vit/digits`, and applies overrides such as
    `optim.lr=3e-4`.

    Raises:
      UserError: no such file, no `get_config`, an unknown key, a wrong type, or a
        value that cannot be right (see `validate`).
    """
    return override(run_file(spec, 'get_config', '--config'), overrides)


def override(
    config: ConfigDict,
    overrides: Iterable[str],
    check: Callable[[ConfigDict], None] = lambda config: None,
) -> ConfigDict:
    """A locked copy of a config with overrides such as `optim.lr=3e-4`, validated.

    Args:
      config: not changed.
      overrides: in order.
      check: called with the config before anything that it names is imported, and after each
        override.

    Raises:
      UserError: as `load`, or as `check`.
    """
    config = copy.deepcopy(config)
    _rename(config)
    config.lock()
    check(config)
    for text in overrides:
        dotted, equals, value = text.partition('=')
        flags.apply(config, f'{RENAMED.get(dotted, dotted)}{equals}{value}')
        check(config)
    with config.unlocked():
        _fill(config)
        _hide_secrets(config)
    validate(config)
    return config


def _hide_secrets(config: ConfigDict) -> None:
    """Leave credentials out of the URLs of a config, which is stored and shown."""
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ConfigDict):
            _hide_secrets(value)
        elif (hidden := hide(value)) != value:
            config[name] = hidden


def _fill(config: ConfigDict) -> None:
    """Add the seed, the evaluations and their sources where a config leaves them out."""
    found = {'seed': keyword_only(schema.Config)['seed'].default, 'evals': ConfigDict()}
    config.update({key: value for key, value in found.items() if key not in config})
    data, evals = config.get('data'), config.evals
    if not (isinstance(data, ConfigDict) and isinstance(evals, ConfigDict) and data.get('source')):
        return
    for entry in evals.values():
        if isinstance(entry, ConfigDict) and 'source' not in entry:
            entry.source = data.source


def _rename(config: ConfigDict) -> None:
    for old, new in RENAMED.items():
        (section, before), (_, after) = old.split('.'), new.split('.')
        group = config.get(section)
        if isinstance(group, ConfigDict) and before in group:
            with config.unlocked():
                group[after] = group[before]
                del group[before]


def run_file(spec: str, function: str, flag: str) -> Any:
    """Executes the file of `FILE[:arg]` and returns the result of its `function(arg)`.

    Args:
      spec: the file and its argument.
      function: its name.
      flag: that gave `spec`, for the message.

    Raises:
      UserError: no such file, or one that is no Python; no such function in it, or an argument that
        it does not take.
    """
    name, _, arg = spec.partition(':')
    module = module_of(name, flag)
    if not hasattr(module, function):
        raise UserError(f'{flag}: {name!r} has no function {function}(arg)')
    made = getattr(module, function)
    if not arg and not inspect.signature(made).parameters:
        return made()
    _check_arg(module, made, arg, f'{flag} {spec}')
    return made(arg or None)


def module_of(name: str, where: str) -> types.ModuleType:
    """The module that a file makes when it is executed.

    Args:
      name: of the file, or of an experiment of the package, see `shipped`.
      where: the flag or place that names it, for the message.

    Raises:
      UserError: no such file, or one that is no Python.
    """
    path = pathlib.Path(name)
    if not path.is_file():
        if (found := shipped.file_of(name)) is None:
            raise UserError(f'{where}: {shipped.missing(name)}')
        path = found
    spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
    if spec is None or spec.loader is None:
        raise UserError(f'{where}: {str(path)!r} is not a Python file; its name has to end in .py')
    try:
        compile(paths.read_bytes(path), path, 'exec')
    # ValueError for bytes that are not text, others for a nesting that no program has.
    except (SyntaxError, ValueError, RecursionError, MemoryError, Unfit) as error:
        raise UserError(f'{where}: {str(path)!r} is not valid Python: {error}') from error
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_arg(module: types.ModuleType, function: Callable, arg: str, where: str) -> None:
    """Raises UserError if the file of a config does not take this argument."""
    if not inspect.signature(function).parameters:
        raise UserError(f'{where}: {function.__name__}() takes no argument; leave out :{arg}')
    choices: Any = getattr(module, 'ARGS', (...,))
    if arg and ... not in choices and arg not in choices:
        raise UserError(f'{where}: ' + nearest('argument', arg, choices))


def parse_config_args(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, ConfigDict | None]:
    """Parses `--config FILE[:arg] --config.a.b=v` next to the flags of `parser`.

    Returns:
      The namespace, and the config (None if `--config` is absent).
    """
    parser.add_argument('--config', metavar='FILE[:ARG]', help='a Python file; it is executed')
    overrides, rest = flags.split(argv)
    args = parser.parse_args(rest)
    if args.config is None:
        if overrides:
            raise UserError(f'--config.{overrides[0]}: there is no --config FILE to override')
        return args, None
    return args, load(args.config, overrides)


def to_json(config: ConfigDict) -> str:
    """The resolved config as JSON, in the order in which it was written."""
    return json.dumps(config.to_dict(), indent=2) + '\n'


def from_json(text: str) -> ConfigDict:
    """A config stored by `to_json`: data only, nothing is executed."""
    return from_dict(paths.parse_json(text))


def from_dict(stored: dict[str, Any]) -> ConfigDict:
    """A config from JSON that is already parsed; see `from_json`."""
    config = ConfigDict(_tuples(hide(stored)))
    _rename(config)
    return config


def require_run(stored: Any, where: str) -> None:
    """Raise UserError unless `stored` has the groups and names of a run's config.

    Args:
      stored: parsed JSON; nothing that it names is imported.
      where: its place, for the message.
    """
    stored = stored if isinstance(stored, dict) else {}
    evals = stored.get('evals')
    groups = {name: stored.get(name) for name in ('model', 'task', 'data', 'evals')}
    groups |= {f'evals.{k}': v for k, v in (evals if isinstance(evals, dict) else {}).items()}
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise UserError(f'{where} is not a run config: config.{name} is no group of keys')
    for name in ('model', 'task'):
        if not isinstance(groups[name].get('name'), str):
            raise UserError(f'{where} is not a run config: config.{name} has no name')


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
