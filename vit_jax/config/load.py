"""Loading, overriding and checking of configs.

A config is a Python file with `get_config(...) -> ConfigDict` (see `recipes`); each sub-dict holds
the keywords of a constructor. Loading the file executes it. The resolved config is stored in the
run folder as JSON, which later commands read and never execute.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import objects, schema
from vit_jax.config.recipes import argument_with_choice, run_file
from vit_jax.config.run import LEFT_OPEN, Inference, Model, Run, Task
from vit_jax.config.words import find_hint
from vit_jax.errors import UserError, hide_secrets, nearest
from vit_jax.storage import paths

# Renamed keys. Configs with the old names still load.
RENAMED = {'parallel.small': 'parallel.min_split_size'}

CONFIG = (
    'Python file (it is executed) or recipe of `list experiments`, with optional arguments: '
    'FILE[:ARG,NAME=VALUE]'
)
OVERRIDES = (
    '--config.KEY=VALUE overrides a value of the config, such as --config.optim.lr=3e-4 or '
    "--config.total='20 epochs'."
)
# Overrides that are applied first, since they determine which keys are valid.
_NAMES = ('model.name=', 'task.name=', 'optim.name=')
# Lower bounds of sizes, for every model; a stack may have no blocks.
_MIN_SIZES = {
    **dict.fromkeys(('patch_size', 'width', 'mlp_dim', 'embed_dim', 'num_heads'), 1),
    'depth': 0,
}


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Load `FILE[:ARGUMENTS]`, or a recipe such as `vit/digits`, with overrides: `optim.lr=3e-4`.

    Raises:
      UserError: for a missing file or `get_config`, an unknown key, a wrong type, or an invalid
        value (see `validate`).
    """
    return override(run_file(spec, 'get_config', '--config'), overrides)


def override(
    config: ConfigDict,
    overrides: Iterable[str],
    check: Callable[[ConfigDict], None] = lambda config: None,
) -> ConfigDict:
    """Copy a config, apply overrides such as `optim.lr=3e-4`, lock and validate it.

    Args:
      config: Not changed.
      overrides: Texts such as `optim.lr=3e-4`, in order, but names first. Another optimizer drops
        the options of the former one that it does not have.
      check: Called with the config before its modules are imported, and after each override.

    Raises:
      UserError: as `load`, or as `check`.
    """
    config = edit(config, overrides, check)
    validate(config)
    return config


def edit(
    config: ConfigDict,
    overrides: Iterable[str],
    check: Callable[[ConfigDict], None] = lambda config: None,
) -> ConfigDict:
    """As `override`, for a config that may lack keys: it is not validated."""
    config = copy.deepcopy(config)
    _rename(config)
    config.lock()
    check(config)
    _nest_model(config)
    for text in sorted(overrides, key=lambda text: not text.startswith(_NAMES)):
        dotted, equals, value = text.partition('=')
        apply_override(config, f'{RENAMED.get(dotted, dotted)}{equals}{value}')
        check(config)
    with config.unlocked():
        _fill(config)
        _hide_secrets(config)
    return config


def _nest_model(config: ConfigDict) -> None:
    """Move fields of the model that have their flat names of earlier versions into groups."""
    model = config.get('model')
    if isinstance(model, ConfigDict) and isinstance(model.get('name'), str):
        nested = objects.merge_fields(model.name, schema.to_plain(model))
        if nested != schema.to_plain(model):
            _set(config, config, 'model', ConfigDict(nested))


def _hide_secrets(config: ConfigDict) -> None:
    """Remove credentials from the URLs of a config, which is stored and shown."""
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ConfigDict):
            _hide_secrets(value)
        elif (hidden := hide_secrets(value)) != value:
            config[name] = hidden


def to_run(config: ConfigDict) -> Run:
    """Return a config's typed form; evaluations use the training vocabulary by default.

    Raises:
      UserError: for a value out of range.
    """
    return _to_typed(config, Run)


def to_inference(config: ConfigDict) -> Inference:
    """Return the typed form of a config that only has what evaluation and prediction read."""
    return _to_typed(config, Inference)


def _to_typed(
    config: ConfigDict, cls: type[schema.Section], strict: bool = False
) -> schema.Section:
    groups = config.to_dict()
    vocab = {key: value for key, value in groups['data'].items() if key == 'vocab'}
    groups['evals'] = {name: vocab | entry for name, entry in groups.get('evals', {}).items()}
    return schema.make_section(cls, groups, 'config', strict)


def section(config: ConfigDict, cls: type[schema.Section]) -> schema.Section:
    """Make one section of a config that may lack others, like configs of old runs and checkpoints.

    Args:
      config: Not changed.
      cls: The dataclass of the section, such as `run.Lora`.
    """
    fields = schema.fields(Run).items()
    name = next(key for key, parameter in fields if parameter.annotation is cls)
    return schema.make_section(cls, config.get(name, {}), f'config.{name}')


def model_and_task(config: ConfigDict) -> tuple[Any, Any]:
    """Return the model and the task of a config that may lack other sections.

    Raises:
      UserError: if a class rejects an option.
    """
    return objects.make_model(section(config, Model)), objects.make_task(section(config, Task))


def _fill(config: ConfigDict) -> None:
    """Add the seed, the evaluations and their sources if a config leaves them out."""
    default_values = {'seed': Run.seed, 'evals': ConfigDict()}
    config.update({key: value for key, value in default_values.items() if key not in config})
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


def parse_config_args(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    complete: bool = True,
    positional: bool = True,
) -> tuple[argparse.Namespace, ConfigDict | None]:
    """Parse `CONFIG --config.a.b=v` or `--config CONFIG --config.a.b=v` beside other flags.

    Args:
      parser: Gets the flag `--config`, and a line on overrides.
      argv: All flags.
      complete: Whether the config has to be valid, with all keys that a run needs.
      positional: Whether the config may be a positional argument.

    Returns:
      The namespace, and the config (None if `--config` is absent).

    Raises:
      UserError: for overrides without a config, or a mistake in the config.
    """
    parser.description = f'{parser.description} {OVERRIDES}'
    if positional:
        parser.usage = '%(prog)s CONFIG [flags]'
        parser.add_argument('subject', nargs='?', metavar='CONFIG', help=CONFIG)
    text = 'config, instead of CONFIG' if positional else CONFIG
    parser.add_argument('--config', metavar='CONFIG', help=text)
    overrides, flags = split_overrides(argv)
    args = parser.parse_args(flags)
    if positional and args.subject is not None:
        if args.config is not None:
            raise UserError(f'{args.subject} and --config name two configs: give one of them')
        args.config = args.subject
    if args.config is None:
        if overrides:
            raise UserError(f'--config.{overrides[0]}: there is no config to override: name one')
        return args, None
    recipe = run_file(args.config, 'get_config', '--config')
    config = (override if complete else edit)(recipe, overrides)
    _report_dropped_options(args.config, recipe, config)
    return args, config


def _report_dropped_options(spec: str, recipe: ConfigDict, config: ConfigDict) -> None:
    """Print the optimizer's options that an override dropped, and the recipe's own argument."""
    options, name = recipe.get('optim', {}), config.get('optim', {}).get('name')
    if dropped := [f'{key}={options[key]!r}' for key in options if key not in config.optim]:
        argument = argument_with_choice(spec, str(name))
        hint = f'; {argument} is the recipe with its own settings for {name}' if argument else ''
        print(f'{name} has no {", ".join(dropped)}: left out{hint}', file=sys.stderr)


def to_json(config: ConfigDict) -> str:
    """Write the resolved config as JSON, in its order."""
    return json.dumps(config.to_dict(), indent=2) + '\n'


def from_json(text: str) -> ConfigDict:
    """Read a config stored by `to_json`; nothing is executed."""
    return from_dict(paths.parse_json(text))


def from_dict(stored: dict[str, Any]) -> ConfigDict:
    """Make a config of parsed JSON; see `from_json`."""
    config = ConfigDict(_tuples(hide_secrets(stored)))
    _rename(config)
    return config


def require_run(stored: Any, file: str) -> None:
    """Raise UserError unless `stored` has the groups and names of a run's config.

    Args:
      stored: Parsed JSON; its modules are not imported.
      file: Its file, for the message.
    """
    stored = stored if isinstance(stored, dict) else {}
    evals = stored.get('evals')
    groups = {name: stored.get(name) for name in ('model', 'task', 'data', 'evals')}
    groups |= {f'evals.{k}': v for k, v in (evals if isinstance(evals, dict) else {}).items()}
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise UserError(f'{file} is not a run config: config.{name} is not a group of keys')
    for name in ('model', 'task'):
        if not isinstance(groups[name].get('name'), str):
            raise UserError(f'{file} is not a run config: config.{name} has no name')


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the overrides: `a=1` of `--config.a=1` or `--config.a 1`; return both lists."""
    overrides, flags, remaining = [], [], list(argv)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith('--config.'):
            flags.append(word)
        elif '=' in word or not remaining:
            overrides.append(word.removeprefix('--config.'))
        else:
            overrides.append(f'{word.removeprefix("--config.")}={remaining.pop(0)}')
    return overrides, flags


def apply_override(config: ConfigDict, override: str) -> None:
    """Set one value of a config, given as `a.b=v`, converted to its constructor's type.

    The config file may leave out the key and its group.

    Raises:
      UserError: for an unknown key, or a missing value or one of another type.
    """
    dotted, equals, text = override.partition('=')
    if not equals:
        raise UserError(f'--config.{dotted}: give a value, as in --config.{dotted}=VALUE')
    *parents, leaf = dotted.split('.')
    if parents == ['model'] and isinstance(name := config.model.get('name'), str):
        placements = objects.place_field(name, leaf, text)
        if placements != [(leaf, text)]:
            for path, value in placements:
                apply_override(config, f'model.{path}={value}')
            return
    node, path = config, ''
    for key in parents:
        node, path = _enter(config, node, path, key, override), f'{path}.{key}'.lstrip('.')
    allowed = schema.accepted_types(_declaration(config, node, path, leaf, override))
    if allowed == (dict,) or isinstance(node.get(leaf), ConfigDict):
        keys = node.get(leaf) or schema.parameters(config, f'{path}.{leaf}'.lstrip('.'))
        hint = f'; set one of its keys: {", ".join(keys)}' if keys else ''
        raise UserError(f'--config.{dotted} is a group{hint}')
    try:
        value = schema.parse_value(text, allowed)
    except ValueError as e:
        off = '; 0 is off' if text.lower() == 'false' and float in allowed else ''
        names = schema.type_names(allowed)
        raise UserError(f'--config.{dotted}={text}: expected {names}{off}') from e
    _set(config, node, leaf, value)
    if dotted == 'optim.name':
        _drop_options(config)


def _drop_options(config: ConfigDict) -> None:
    """Remove the keys of `config.optim` that its optimizer does not have."""
    valid = schema.parameters(config, 'optim')
    with config.unlocked():
        for key in [key for key in config.optim if key not in valid]:
            del config.optim[key]


def _enter(config: ConfigDict, node: ConfigDict, path: str, key: str, override: str) -> ConfigDict:
    """Return the group `key` of the section at `path`; added if it is declared."""
    declaration = _declaration(config, node, path, key, override)
    if key not in node:
        is_group = schema.accepted_types(declaration) in ((), (dict,))
        _set(config, node, key, ConfigDict() if is_group else declaration.default)
    if not isinstance(node[key], ConfigDict):
        group_name = '.'.join(filter(None, ('config', path, key)))
        raise UserError(f'--config.{override}: {group_name} is a value and has no keys')
    return node[key]


def _declaration(
    config: ConfigDict, node: ConfigDict, path: str, key: str, override: str
) -> inspect.Parameter:
    """Return the declaration of a key of the section at `path`; `ANY` if only the file has it."""
    valid = schema.parameters(config, path)
    is_open = path.partition('.')[0] == 'model' and schema.follows_checkpoint(config)
    if is_open or (key in node and key not in valid):
        return schema.ANY
    if key not in valid:
        raise _unknown(f'config.{path}'.rstrip('.'), key, {*node, *valid}, override)
    return valid[key]


def _unknown(parent: str, key: str, valid: Iterable[str], override: str) -> UserError:
    dotted, _, value = override.partition('=')
    if (hint := find_hint(key, value)) and hint.partition('=')[0] != f'--config.{dotted}':
        return UserError(
            f'--config.{dotted}: unknown key of {parent} {key!r}; did you mean {hint}?'
        )
    return UserError(f'--config.{dotted}: ' + nearest(f'key of {parent}', key, valid))


def _set(config: ConfigDict, node: ConfigDict, key: str, value: Any) -> None:
    """Set a checked value, which may change the type."""
    with config.unlocked(), config.ignore_type():
        node[key] = value


def validate(config: ConfigDict) -> None:
    """Check a config before anything is built or written.

    Raises:
      UserError: for a missing or unknown key, a value of the wrong type or out of range, a number
        that is not finite, or an invalid duration.
    """
    schema.require_complete(config)
    _check_finite(config, 'config')
    run = _to_typed(config, Run, strict=True)
    for name, entry in run.evals.items():
        objects.make_evaluator(entry, f'config.evals.{name}')
    for name in run.writers:
        if not isinstance(name, str):
            raise UserError(f'config.writers: {name!r} is not a name')
        objects.writer_class(name)
    for key, least in _MIN_SIZES.items():
        value = run.model.options.get(key)
        if isinstance(value, (int, float)) and value < least:
            raise UserError(f'config.model.{key}={value}: must be at least {least}')
    if run.model.name is not None:  # otherwise it is the checkpoint's
        open_ = {key: 1000 for key in LEFT_OPEN if run.model.options.get(key, 0) is None}
        objects.make_model(Model(name=run.model.name, options={**run.model.options, **open_}))


def _check_finite(node: Any, path: str) -> None:
    if isinstance(node, (ConfigDict, dict)):
        for key, value in node.items():
            _check_finite(value, f'{path}.{key}')
    elif isinstance(node, (tuple, list)):
        for i, value in enumerate(node):
            _check_finite(value, f'{path}.{i}')
    elif isinstance(node, float) and not math.isfinite(node):
        raise UserError(f'{path}={node}: must be a finite number')
