"""The keys of a config, derived from the signatures of the constructors that read its sections.

There is no second list of keys: signatures have the names, defaults and types, and a key without
a default is required. Constructors are imported when needed, since most of them import JAX.

Models, tasks and evaluators take all their parameters from a section. Other constructors take
those after the `*` of their signature; the trainer passes the parameters before it. A parameter
whose name would be a Python keyword ends in an underscore: `from_` is the key `from`.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import keyword
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from vit_jax.checkpoints.best import EarlyStop
from vit_jax.config import durations
from vit_jax.config.durations import Every
from vit_jax.config.origin import Branch, Init
from vit_jax.errors import UserError, nearest, resolve
from vit_jax.evaluators import base as evaluators
from vit_jax.signatures import Duration, Parameters, are_durations, is_duration, keyword_only
from vit_jax.signatures import parameters as all_parameters
from vit_jax.writers import base as writers

if TYPE_CHECKING:
    from vit_jax.models.base import Model
    from vit_jax.tasks.base import Task

Group = Mapping[str, Any]

# The trainer's own sections; '' is the config itself.
SECTIONS = (
    '',
    'data',
    'optim',
    'optim.schedule',
    'optim.decay_schedule',
    'step',
    'step.ema_schedule',
    'step.sam',
    'step.sam_schedule',
    'every',
    'checkpoint',
    'parallel',
    'init',
    'branch',
    'lora',
    'early_stop',
)
# Sizes of a model that a config may leave None, to be filled in from the data.
LEFT_OPEN = {'num_classes': 'classes', 'vocab_size': 'ids in its vocabulary'}
BOOLS = {'true': True, '1': True, 'false': False, '0': False}
NONE = type(None)
_NAMES = {dict: 'a group of keys', NONE: 'None'}


@dataclasses.dataclass(kw_only=True)
class Config:
    """The keys of a config; groups are its sections.

    Attributes:
      seed: random seed.
      total: length of the run.
      batch_size: examples of a global batch; tokens if the data are sequences in buckets.
      model: the model and its sizes.
      task: the task, which defines the loss.
      data: the training data.
      evals: one group an evaluation, with the keys of `data`, of `Entry` and of its evaluator; its
        source defaults to that of `data`.
      optim: the optimizer, its parameter groups and its schedule.
      step: accumulation, averaging and skipping in an update.
      every: intervals of logging, evaluation and checkpoints.
      checkpoint: the checkpoints to keep.
      parallel: the layout of arrays on the devices.
      init: the checkpoint for initializing the parameters, instead of random initialization.
      branch: the run whose state is continued.
      lora: low-rank adapters, which are trained instead of the whole model.
      early_stop: condition for ending the run before its total.
      writers: receivers of the metrics besides the run folder: `tensorboard`, `wandb`, `mlflow`, or
        dotted names of your own modules, see `vit_jax.writers`.
    """

    seed: int = 0
    total: Duration
    batch_size: int
    model: Group
    task: Group
    data: Group
    evals: Group = dataclasses.field(default_factory=dict)
    optim: Group
    step: Group = dataclasses.field(default_factory=dict)
    every: Group = dataclasses.field(default_factory=dict)
    checkpoint: Group = dataclasses.field(default_factory=dict)
    parallel: Group = dataclasses.field(default_factory=dict)
    init: Group = dataclasses.field(default_factory=dict)
    branch: Group = dataclasses.field(default_factory=dict)
    lora: Group = dataclasses.field(default_factory=dict)
    early_stop: Group = dataclasses.field(default_factory=dict)
    writers: tuple[str, ...] = ('tensorboard',)


@dataclasses.dataclass(kw_only=True)
class Named:
    """The key of `config.model` and `config.task` beside their constructor's keywords.

    Attributes:
      name: a module of the package, or the dotted name of your own; None for the model of
        `config.init.from`, with any other keys of `config.model` replaced.
    """

    name: str | None


@dataclasses.dataclass(kw_only=True)
class Entry:
    """The keys of an entry of `config.evals` beside those of its data.

    Attributes:
      evaluator: its name; if None, the task evaluates.
      fit: the split that an evaluator learns from.
      every: replaces `config.every.eval`.
      batch_size: replaces `config.batch_size`.
    """

    evaluator: str | None = None
    fit: str | None = None
    every: Duration | None = None
    batch_size: int | None = None


def nested_sections(section: str) -> list[str]:
    """The sections nested in one of the trainer's own sections, as 'optim.schedule' in 'optim'."""
    return [name for name in SECTIONS if name.startswith(f'{section}.')]


def constructor(section: str) -> Callable:
    """The constructor of one of the trainer's own sections, as 'optim.schedule'."""
    match section:
        case '':
            return Config
        case 'data':
            from vit_jax.data.dataset import DataConfig

            return DataConfig
        case 'optim':
            from vit_jax.optim.make import make

            return make
        case 'optim.schedule' | 'optim.decay_schedule' | 'step.ema_schedule' | 'step.sam_schedule':
            from vit_jax.optim import schedules

            return schedules.make
        case 'step':
            from vit_jax.step import make_train_step

            return make_train_step
        case 'step.sam':
            from vit_jax.optim.sharpness import Sam

            return Sam
        case 'lora':
            from vit_jax.optim.lora import Lora

            return Lora
        case 'checkpoint':
            from vit_jax.checkpoints.checkpointer import Checkpointer

            return Checkpointer
        case 'parallel':
            from vit_jax.runtime.sharding import make_layout

            return make_layout
    return {'every': Every, 'init': Init, 'branch': Branch, 'early_stop': EarlyStop}[section]


def model_class(config: ConfigDict) -> type[Model]:
    """The Linen module class named by `config.model.name`.

    Raises:
      UserError: if it does not exist, or is not derived from `vit_jax.models.base.Model`.
    """
    from vit_jax.models.base import Model  # here, since it imports JAX

    name = _name(config, 'model')
    return _derived(resolve('vit_jax.models', name, 'Model'), Model, name)


def task_class(config: ConfigDict) -> type[Task]:
    """The task dataclass named by `config.task.name`.

    Raises:
      UserError: if it does not exist, or is not derived from `vit_jax.tasks.base.Task`.
    """
    from vit_jax.tasks.base import Task

    name = _name(config, 'task')
    return _derived(resolve('vit_jax.tasks', name, 'Task'), Task, name)


def evaluator_class(name: str) -> type[evaluators.Evaluator]:
    """The class named by an entry's `evaluator`.

    Raises:
      UserError: if it does not exist, or is not derived from `vit_jax.evaluators.base.Evaluator`.
    """
    return _derived(resolve('vit_jax.evaluators', name, 'Evaluator'), evaluators.Evaluator, name)


def writer_class(name: str) -> type[writers.Writer]:
    """The class named by one of `config.writers`.

    Raises:
      UserError: if it does not exist, or is not derived from `vit_jax.writers.base.Writer`.
    """
    return _derived(resolve('vit_jax.writers', name, 'Writer'), writers.Writer, name)


def _derived(found: Any, base: type, name: str) -> Any:
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f'{base.__name__.lower()} name {name!r}: its {base.__name__} must be derived from '
            f'{base.__module__}.{base.__name__}'
        )
    return found


def parameters(config: ConfigDict, section: str) -> Parameters:
    """The valid keys of a section, with their defaults and types.

    Args:
      config: names the model, task, optimizer and evaluators.
      section: as 'optim.schedule' or 'evals.test'; empty for the config itself.

    Raises:
      UserError: for an unknown model, task, optimizer or evaluator.
    """
    if section == 'model' and follows_checkpoint(config):
        return dict.fromkeys(config.model, inspect.Parameter('any', inspect.Parameter.KEYWORD_ONLY))
    if section in ('model', 'task'):
        cls = model_class(config) if section == 'model' else task_class(config)
        return keyword_only(Named) | constructor_keys(cls)
    if section.startswith('evals.'):
        return entry_parameters(config.evals[section.removeprefix('evals.')])
    if section not in SECTIONS:
        return {}
    found = {key_name(name): p for name, p in keyword_only(constructor(section)).items()}
    if section == 'optim':
        from vit_jax.optim import make

        options = make.options(_name(config, 'optim'))
        found |= {name: p for name, p in options.items() if name not in found}
    return found


def readers(config: ConfigDict, section: str) -> tuple[Callable, ...]:
    """The constructors whose docstrings describe the keys of a section; see `parameters`."""
    if section == 'model' and follows_checkpoint(config):
        return (Named,)
    if section in ('model', 'task'):
        return (Named, model_class(config) if section == 'model' else task_class(config))
    if section.startswith('evals.'):
        name = config.evals[section.removeprefix('evals.')].get('evaluator')
        return constructor('data'), Entry, *((evaluator_class(name),) if name else ())
    if section not in SECTIONS:
        return ()
    if section != 'optim':
        return (constructor(section),)
    from vit_jax.optim import make

    return make.factory(_name(config, 'optim')), constructor('optim')


def entry_parameters(section: Mapping[str, Any]) -> Parameters:
    """The valid keys of an entry of `config.evals`."""
    found = keyword_only(constructor('data')) | keyword_only(Entry)
    cls = evaluator_class(section['evaluator']) if section.get('evaluator') else None
    if cls is None:
        return {name: p for name, p in found.items() if name != 'fit'}
    if not cls.learns:
        del found['fit']
    return found | constructor_keys(cls)


def constructor_keys(cls: Callable) -> Parameters:
    """The keys of a model, task or evaluator, without Flax's own `parent` and `name`."""
    found = all_parameters(cls).items()
    return {key_name(name): p for name, p in found if name not in ('parent', 'name')}


def key_name(name: str) -> str:
    """The key of a parameter: `from_` -> `from`."""
    bare = name.removesuffix('_')
    return bare if keyword.iskeyword(bare) else name


def follows_checkpoint(config: ConfigDict) -> bool:
    """Whether the model comes from the checkpoint `config.init.from`, not read yet."""
    model = config.get('model')
    return isinstance(model, (ConfigDict, dict)) and model.get('name', '') is None


def _name(config: ConfigDict, section: str) -> str:
    if config.get(section, {}).get('name') is None:
        raise UserError(f"config.{section}: the key 'name' is missing")
    return config[section].name


def check_group(section: Any, where: str) -> None:
    """Raise UserError if a section is not a group of keys."""
    if not isinstance(section, (ConfigDict, dict)):
        raise UserError(f'{where}={section!r}: expected a group of keys')


def check(section: Group, known: Parameters, where: str) -> None:
    """Raise UserError if a section lacks a required key, or has an unknown or ill-typed one.

    Args:
      section: a group of keys of a config.
      known: as returned by `parameters`.
      where: the section's name, for messages.
    """
    check_known(section, known, where)
    if lacking := [key for key in required(known) if key not in section]:
        raise UserError(f'{where}: {_missing(lacking)}')
    for key, value in section.items():
        if not (value is None and key in LEFT_OPEN):
            check_value(known[key], value, f'{where}.{key}')


def check_known(section: Group, known: Parameters, where: str) -> None:
    """Raise UserError if a section has an unknown key."""
    for key in section:
        if key not in known:
            raise UserError(f'{where}: ' + nearest('key', key, known))


def check_complete(config: ConfigDict) -> None:
    """Raise a UserError that names all missing keys of the sections that a run needs."""
    known = parameters(config, '')
    lacking = []
    for key in required(known):
        given = config.get(key, {})
        if accepted_types(known[key]) != (dict,):
            lacking += [] if key in config else [key]
        elif isinstance(given, (ConfigDict, dict)):
            needed = _needs(config, key)
            lacking += (f'{key}.{name}' for name, p in needed.items() if _lacks(given, name, p))
    if follows_checkpoint(config) and not config.get('init', {}).get('from'):
        lacking.append('init.from')
    if lacking:
        raise UserError(f'config: {_missing(lacking)}')


def _needs(config: ConfigDict, section: str) -> Parameters:
    """The required keys of a section; without a name, those common to all names."""
    if section == 'data' or 'name' in config.get(section, {}):
        return required(parameters(config, section))
    own = section in ('model', 'task')
    return required(keyword_only(Named if own else constructor(section)))


def required(known: Parameters) -> Parameters:
    """The keys without a default."""
    return {key: p for key, p in known.items() if p.default is p.empty}


def _lacks(section: Group, key: str, parameter: inspect.Parameter) -> bool:
    """Whether a section lacks a value for a required key; a placeholder does not count."""
    if key not in section:
        return True
    takes_none = key in LEFT_OPEN or NONE in (accepted_types(parameter) or (NONE,))
    return section[key] is None and not takes_none


def _missing(keys: Sequence[str]) -> str:
    names = ', '.join(map(repr, keys))
    return f'the keys {names} are missing' if len(keys) > 1 else f'the key {names} is missing'


def accepted_types(parameter: inspect.Parameter) -> tuple[type, ...]:
    """The types that a parameter accepts: bool, int, float, str, tuple, dict, NoneType.

    They come from the annotation, or from the default if the annotation is not a type for configs,
    such as `Any` or an array type. Empty if the default does not tell either.
    """
    annotation, default = parameter.annotation, parameter.default
    if is_duration(annotation):
        return (str, int, NONE) if default is None else (str, int)
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    found = tuple(_plain(member) for member in members)
    if None not in found:
        return typing.cast(tuple[type, ...], found)
    known = default is not parameter.empty and default is not None
    kind = _plain(type(default)) if known else None
    return () if kind is None else (kind, *((NONE,) if NONE in found else ()))


def _plain(annotation: Any) -> type | None:
    """The plain type of an annotation's values in a config; None for any other annotation."""
    kind = typing.get_origin(annotation) or annotation
    if kind in (bool, int, float, str, NONE):
        return kind
    for abstract, plain in ((collections.abc.Mapping, dict), (collections.abc.Sequence, tuple)):
        if isinstance(kind, type) and issubclass(kind, abstract):
            return plain
    return None


def check_value(parameter: inspect.Parameter, value: Any, where: str) -> None:
    """Raise UserError if a parameter does not accept a value."""
    allowed = accepted_types(parameter)
    if allowed and not any(_is(value, kind) for kind in allowed):
        raise UserError(f'{where}={value!r}: expected {type_names(allowed)}')
    texts = (value,) if is_duration(parameter.annotation) else ()
    for text in value if are_durations(parameter.annotation) else texts:
        if text is not None:
            durations.parse_duration(text, where)


def type_names(allowed: tuple[type, ...]) -> str:
    """Types in words, as 'float or None'."""
    return ' or '.join(_NAMES.get(kind, kind.__name__) for kind in allowed)


def _is(value: Any, kind: type) -> bool:
    wider = {float: (int, float), tuple: (list, tuple), dict: (dict, ConfigDict)}
    return isinstance(value, wider.get(kind, kind))


def parse_value(text: str, allowed: tuple[type, ...]) -> Any:
    """Parse `text` as the first type that fits; raise ValueError if none does."""
    if not allowed:
        return _literal_or_text(text)
    if text == 'None' and NONE in allowed:
        return None
    for kind in allowed:
        try:
            return _parse(text, kind)
        except ValueError:
            pass
    raise ValueError(text)


def _parse(text: str, kind: type) -> Any:
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
    value = _literal_or_text(text)
    if isinstance(value, str) or not _is(value, kind):
        raise ValueError(text)
    return tuple(value) if kind is tuple else value


def _literal_or_text(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
