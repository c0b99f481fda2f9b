"""From a config file and flags to a checked config, and from a config to objects.

A config is a Python file with `get_config(arg: str | None) -> ConfigDict`; every
sub-dict holds the keywords of the constructor that it is passed to. Loading one
executes it. The resolved config is stored in the run folder as JSON, which is
what every later command reads, and which is never executed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax import durations, optim, schedules
from vit_jax.errors import UserError, nearest, resolve

SECTIONS = ('model', 'task', 'data', 'evals', 'optim', 'step', 'every', 'checkpoint', 'parallel')
KEYS = ('seed', 'total', 'batch_size', *SECTIONS)
# Sections that a config may leave out, and what they then hold. init: the checkpoint that a new run
# starts from, another code base's or a run folder, and how its position embedding is resized.
# branch: the run folder and the kept step of which a new run continues the whole state.
OPTIONAL: dict[str, dict[str, Any]] = {
    'init': {'from': '', 'posemb': 'bilinear'},
    'branch': {'from': '', 'step': 0},
}
POSEMBS = ('bilinear', 'bicubic')
# What a section of data says of its examples, and of how to load them.
EXAMPLES = ('source', 'split', 'classes', 'transforms', 'vocab', 'buckets')
LOADING = ('workers', 'threads', 'cache', 'stall_seconds')


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Runs `FILE[:arg]` and applies overrides such as `optim.lr=3e-4`.

    Raises:
      UserError: no such file, no `get_config`, an unknown key, a wrong type, or a
        value that cannot be right (see `validate`).
    """
    return override(run_file(spec, 'get_config', '--config'), overrides)


def override(config: ConfigDict, overrides: Iterable[str]) -> ConfigDict:
    """Locks the config, applies overrides such as `optim.lr=3e-4` to it, and validates it.

    Raises:
      UserError: as `load`.
    """
    config.lock()
    for text in overrides:
        _override(config, text)
    validate(config)
    return config


def run_file(spec: str, function: str, flag: str) -> Any:
    """Executes the file of `FILE[:arg]` and returns what its `function(arg)` does.

    Args:
      spec: the file and its argument.
      function: its name.
      flag: where `spec` was given, for the message.

    Raises:
      UserError: no such file, or no such function in it.
    """
    name, _, arg = spec.partition(':')
    path = pathlib.Path(name)
    if not path.is_file():
        raise UserError(f'{flag}: no file {str(path)!r}')
    found = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    if not hasattr(module, function):
        raise UserError(f'{flag}: {str(path)!r} has no function {function}(arg)')
    return getattr(module, function)(arg or None)


def _override(config: ConfigDict, override: str) -> None:
    dotted, equals, text = override.partition('=')
    if not equals:
        raise UserError(f'--config.{dotted}: give a value, as in --config.{dotted}=VALUE')
    if (section := dotted.partition('.')[0]) in OPTIONAL:
        with config.unlocked():
            config[section] = {**OPTIONAL[section], **config.get(section, {})}
    *parents, leaf = dotted.split('.')
    node, path = config, 'config'
    for key in parents:
        node, path = _child(node, key, path, dotted), f'{path}.{key}'
        if not isinstance(node, ConfigDict):
            raise UserError(f'--config.{dotted}: {path} is a value and has no keys')
    defaults = _defaults(config, parents)
    if leaf in defaults and leaf not in node:
        with config.unlocked():
            node[leaf] = defaults[leaf]
    if isinstance(_child(node, leaf, path, dotted, defaults), ConfigDict):
        raise UserError(
            f'--config.{dotted} is a group; set one of its keys: {", ".join(node[leaf])}'
        )
    kind = node.get_type(leaf)
    try:
        node[leaf] = parse_value(text, kind)
    except (TypeError, ValueError) as e:
        raise UserError(f'--config.{dotted}={text}: expected {kind.__name__}') from e


def _child(node: ConfigDict, key: str, path: str, dotted: str, more: Iterable[str] = ()) -> Any:
    if key not in node:
        raise UserError(f'--config.{dotted}: ' + nearest(f'key of {path}', key, {*node, *more}))
    return node[key]


def _defaults(config: ConfigDict, parents: list[str]) -> dict[str, Any]:
    """What the constructor of a section has by default: a flag may set what the file leaves out."""
    constructors: dict[str, Callable[[], Callable]] = {
        'model': lambda: model_class(config),
        'task': lambda: task_class(config),
        'optim': lambda: optim.make,
        'optim.schedule': lambda: schedules.make,
    }
    section = '.'.join(parents)
    if section not in constructors:
        return {}
    fields = inspect.signature(constructors[section]()).parameters
    defaults = {
        name: _unset(field.annotation) if field.default is None else field.default
        for name, field in fields.items()
        if name not in ('name', 'parent') and field.default is not field.empty
    }
    if section == 'optim.schedule':
        defaults |= {name: str(defaults[name]) for name in optim.DURATIONS}
    return defaults


def _unset(annotation: Any) -> Any:
    """A value that is None until a flag sets it, of the type in `int | None` or `float | None`."""
    return placeholder(float if 'float' in str(annotation) else int)


BOOLS = {'true': True, '1': True, 'false': False, '0': False}


def parse_value(text: str, kind: type) -> Any:
    """`text` as a value of `kind`; raises ValueError if it is none."""
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in BOOLS:
            raise ValueError(text)
        return BOOLS[text.lower()]
    if kind in (int, float):
        number = float(text)
        if kind is int and not number.is_integer():
            raise ValueError(text)
        return kind(number)
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError) as e:
        raise ValueError(text) from e
    return tuple(value) if kind is tuple else value


def validate(config: ConfigDict) -> None:
    """Rejects what can be seen to be wrong before anything is built or written.

    Raises:
      UserError: a missing section, a NaN, a batch or duration that is not
        positive, a keyword that a constructor does not take.
    """
    for key in KEYS:
        if key not in config:
            raise UserError(f'config: the key {key!r} is missing')
    for key in config:
        if key not in (*KEYS, *OPTIONAL):
            raise UserError('config: ' + nearest('key', key, (*KEYS, *OPTIONAL)))
    for path, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f'config.{path}={value}: must be a finite number')
    for path in ('batch_size', 'step.accum_steps'):
        if (value := _at(config, path, 1)) < 1:
            raise UserError(f'config.{path}={value}: must be at least 1')
    for path in ('total', 'every.log'):
        if durations.parse_duration(_at(config, path), f'config.{path}')[0] <= 0:
            raise UserError(f'config.{path}={_at(config, path)!r}: must be positive')
    check_keywords(model_class(config), config.model, 'config.model')
    check_keywords(task_class(config), config.task, 'config.task')
    _check_optional(config)
    check_data(config.data, 'config.data')
    for name, section in config.evals.items():
        make_evaluator(section, f'config.evals.{name}')


def _leaves(node: Any, prefix: str = '') -> list[tuple[str, Any]]:
    if isinstance(node, (ConfigDict, dict)):
        return [x for k, v in node.items() for x in _leaves(v, f'{prefix}{k}.')]
    if isinstance(node, (tuple, list)):
        return [x for i, v in enumerate(node) for x in _leaves(v, f'{prefix}{i}.')]
    return [(prefix[:-1], node)]


def _at(config: ConfigDict, dotted: str, default: Any = None) -> Any:
    node: Any = config
    for key in dotted.split('.'):
        if key not in node:
            return default
        node = node[key]
    return node


def check_keywords(constructor: Callable, keywords: ConfigDict, where: str) -> None:
    """Raises UserError if `keywords` (less `name`) are not those of `constructor`."""
    valid = set(inspect.signature(constructor).parameters) - {'parent', 'name'}
    for key in keywords:
        if key != 'name' and key not in valid:
            raise UserError(f'{where}: ' + nearest('key', key, valid))


def check_data(section: ConfigDict, where: str, more: Iterable[str] = ()) -> None:
    """Raises UserError for a section without source or split, or with unknown keys.

    Args:
      section: `config.data`, or an entry of `config.evals`.
      where: its name, for the message.
      more: further keys that it may have.
    """
    valid = {*EXAMPLES, *LOADING, *more}
    for key in section:
        if key not in valid:
            raise UserError(f'{where}: ' + nearest('key', key, valid))
    for key in ('source', 'split'):
        if key not in section:
            raise UserError(f'{where}: the key {key!r} is missing')


def _check_optional(config: ConfigDict) -> None:
    for name, default in OPTIONAL.items():
        for key in config.get(name, {}):
            if key not in default:
                raise UserError(f'config.{name}: ' + nearest('key', key, default))
    init, branch = ({**OPTIONAL[k], **config.get(k, {})} for k in ('init', 'branch'))
    if init['posemb'] not in POSEMBS:
        raise UserError('config.init.posemb: ' + nearest('method', init['posemb'], POSEMBS))
    if branch['from'] and init['from']:
        raise UserError('config: a run starts from config.branch or config.init, not both')


def model_class(config: ConfigDict) -> Any:
    """The Linen module class that `config.model.name` stands for."""
    return resolve('vit_jax.models', config.model.name, 'Model')


def task_class(config: ConfigDict) -> Any:
    """The task dataclass that `config.task.name` stands for."""
    return resolve('vit_jax.tasks', config.task.name, 'Task')


def evaluator_class(name: str) -> Any:
    """The class that `name`, an entry's `evaluator`, stands for."""
    return resolve('vit_jax.evaluators', name, 'Evaluator')


def keywords(section: ConfigDict) -> dict[str, Any]:
    """A section as keywords of its constructor: plain and hashable, without `name`."""
    plain = section.to_dict() if isinstance(section, ConfigDict) else dict(section)
    return {k: _freeze(v) for k, v in plain.items() if k != 'name'}


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    return value


def build(config: ConfigDict) -> tuple[Any, Any]:
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


def make_evaluator(section: ConfigDict, where: str) -> Any:
    """A new evaluator of an entry of `config.evals`; None where the task evaluates it.

    Raises:
      UserError: no such evaluator, a key that is not known or has a value that cannot be, or
        no `fit` split for an evaluator that learns.
    """
    if 'evaluator' not in section:
        check_data(section, where, ['batch_size', 'every'])
        return None
    cls = evaluator_class(section.evaluator)
    own = set(inspect.signature(cls).parameters)
    fit = ['fit'] if hasattr(cls, 'fit') else []
    check_data(section, where, ['batch_size', 'every', 'evaluator', *fit, *own])
    if fit and 'fit' not in section:
        raise UserError(f"{where}: name the split to learn from, as fit='train'")
    try:
        return cls(**{k: v for k, v in keywords(section).items() if k in own})
    except (TypeError, UserError) as e:
        raise UserError(f'{where}: {e}') from e


def fill_num_classes(config: ConfigDict, num_classes: int) -> None:
    """Sets `config.model.num_classes` from the data where the config leaves it open.

    Raises:
      UserError: if the data has more classes than the model.
    """
    _fill(config, 'num_classes', num_classes, 'classes')


def fill_vocab_size(config: ConfigDict, vocab_size: int) -> None:
    """Sets `config.model.vocab_size` from the data where the config leaves it open.

    Raises:
      UserError: if the data has more ids than the model.
    """
    _fill(config, 'vocab_size', vocab_size, 'ids in its vocabulary')


def _fill(config: ConfigDict, key: str, size: int, what: str) -> None:
    if key not in config.model or not size:
        return
    if config.model[key] is None:
        config.model[key] = size
    if config.model[key] < size:
        raise UserError(
            f'config.model.{key}={config.model[key]}: {config.data.source} has {size} {what}; '
            'leave it unset or raise it'
        )


def to_json(config: ConfigDict) -> str:
    """The resolved config as JSON, in the order in which it was written."""
    return json.dumps(config.to_dict(), indent=2) + '\n'


def from_json(text: str) -> ConfigDict:
    """A config stored by `to_json`: data only, nothing is executed."""
    return ConfigDict(_tuples(json.loads(text)))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def parse_config_args(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, ConfigDict | None]:
    """Parses `--config FILE[:arg] --config.a.b=v` next to the flags of `parser`.

    Returns:
      The namespace, and the config (None where `--config` is absent).
    """
    parser.add_argument('--config', metavar='FILE[:ARG]', help='a Python file; it is executed')
    overrides, rest = split_overrides(argv)
    args = parser.parse_args(rest)
    if args.config is None:
        if overrides:
            raise UserError(f'--config.{overrides[0]}: there is no --config FILE to override')
        return args, None
    return args, load(args.config, overrides)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--config.a=1` and `--config.a 1` as overrides `a=1`; and all the other words."""
    overrides, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith('--config.'):
            rest.append(word)
        elif '=' in word or not words:
            overrides.append(word.removeprefix('--config.'))
        else:
            overrides.append(f'{word.removeprefix("--config.")}={words.pop(0)}')
    return overrides, rest
