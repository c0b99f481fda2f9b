"""Recipes: Python files with a config or a sweep, and their arguments.

A recipe is a file with `get_config(variant='S/16', epochs=90) -> ConfigDict`, or with `get_sweep`.
`FILE:B/16,epochs=300` gives arguments by name, the first one also without it; a word that names a
true-or-false argument turns it on. Types come from the defaults, choices from `Literal`
annotations. An argument whose default is a tuple takes any of its values: `FILE:S/16,B/16`.

The word `smoke` applies the file's `smoke(config)`, which shrinks the finished config to seconds of
work without data. A sweep is then one of that config, and `smoke_sweep(sweep) -> Sweep` reduces it.

A function whose only parameter is called `arg` gets the text as it is. Loading a file executes it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from vit_jax.errors import UnsuitableFile, UserError, nearest
from vit_jax.signatures import Parameters, parameters
from vit_jax.storage import paths

# The recipes: in a clone a link to their folder, in a wheel the files.
FOLDER = pathlib.Path(__file__).parents[1] / 'experiments'
SMOKE = 'smoke'
_SHRINK = {'get_config': SMOKE, 'get_sweep': 'smoke_sweep'}
_TEXT = 'arg'  # a function's only parameter, if it parses its argument itself
_BOOLS = {'true': True, '1': True, 'false': False, '0': False}

_LEVEL = r'none|(light|medium|strong)\d'
_SIZE = r'[\w+-]+/\d+'  # of a model, such as R50+B/16
# Words of arguments before they had names, by recipe, or recipe and function: a regular expression,
# and what it means now. A meaning with a colon names another recipe, which the remaining words are
# for.
OLD_WORDS: dict[str, dict[str, str]] = {
    '': {r'(\d+)ep': r'epochs=\1'},
    'bit/finetune': {r'R\d+x\d': r'variant=\g<0>'},
    'colorization/coltran_core': {'cifar10': 'colorization/coltran_core_cifar10:'},
    'colorization/coltran_upsamplers': {'cifar10': 'colorization/coltran_upsamplers_cifar10:'},
    'detr/coco_panoptic': {'boxes': 'detr/coco_boxes:'},
    'detr/finetune': {'|auto': 'detr/own:'},
    'detr/scenes_panoptic': {'boxes': 'detr/scenes_boxes:'},
    'eomt/scenes': {'vit_s14': 'eomt/scenes_vit_s14:'},
    'eomt/semantic': {
        **{'|ade20k': 'eomt/ade20k:', 'cityscapes': 'eomt/cityscapes:'},
        'smoke': 'eomt/ade20k:smoke',
    },
    'eomt/finetune': {'auto': 'eomt/own:'},
    'eomt/own': {r'(\d+)': r'size=\1'},
    'jit/cifar10': {r'(\w+)/(\d+)': r'\1,patch=\2'},
    'jit/restore': {r'(cifar10|digits)': r'data=\1'},
    'mae/cifar10': {
        **{'pretrain': '', 'probe': 'mae/cifar10_probe:', 'finetune': 'mae/cifar10_finetune:'},
        **{
            'scratch': 'mae/cifar10_finetune:scratch',
            'smoke-finetune': 'mae/cifar10_finetune:smoke',
        },
    },
    'mae/cifar10_finetune': {r'\d+%': r'labels=\g<0>'},
    'mae/imagenet': {'finetune': 'mae/imagenet_finetune:', 'probe': 'mae/imagenet_probe:'},
    'scaling/cifar10': {'smoke-bit': 'bit,smoke'},
    'scaling/cifar10_isoflop': {'digits-cosine': 'digits,cosine'},
    'scaling/cifar10_isoflop get_config': {'cosine': '', 'digits-cosine': 'digits'},
    'scaling/vit_compute': {'smoke-bit': 'bit,smoke', r'(\d+)': r'epochs=\1'},
    'scaling/vit_data_size': {'smoke-bit': 'bit,smoke'},
    'scaling/zhai': {r'\d+M': r'images=\g<0>'},
    'sweeps/digits': {r'smoke-(grid|star)': r'\1,smoke'},
    'swin/imagenet': {
        '22k': 'swin/imagenet_finetune:i22k',
        '384': 'swin/imagenet_finetune:size=384',
    },
    'swin/imagenet_finetune': {'22k': 'i22k', '384': 'size=384'},
    'transfer/cifar10_dinov2': {'finetune': '', r'\d+%': r'labels=\g<0>'},
    'transfer/cifar10_heldout': {'finetune': ''},
    'vit/augreg': {'i21k': 'vit/augreg_i21k:', _LEVEL: r'level=\g<0>'},
    'vit/augreg_i21k': {_LEVEL: r'level=\g<0>'},
    'vit/cifar10': {'gpu': 'vit/cifar10_gpu:'},
    'vit/finetune': {
        **{'auto': 'vit/own:', 'transfer': 'vit/transfer:', 'map|gap': r'pool=\g<0>'},
        _SIZE: r'variant=\g<0>',
    },
    'vit/imagenet2012': {'vit5': 'vit/vit5:', 'naflex': 'vit/naflex:', 'flexi': 'vit/flexivit:'},
    'vit/own': {r'(\d+)': r'size=\1'},
    'vit/transfer': {_SIZE: r'variant=\g<0>'},
}


def run_file(spec: str, function: str, flag: str) -> Any:
    """Execute the file of `FILE[:ARGUMENTS]` and return the result of one of its functions.

    Args:
      spec: The file, or a recipe of the package such as `vit/digits`, and its arguments.
      function: `get_config` or `get_sweep`.
      flag: The source of `spec`, for messages.

    Raises:
      UserError: if the file is missing or is not Python, lacks the function, or does not accept the
        arguments.
    """
    name, text = translate(spec, function)
    module, reference = load_module(name, flag), f'{flag} {spec}'
    if not hasattr(module, function):
        raise UserError(f'{flag}: {name!r} has no function {function}')
    make = getattr(module, function)
    if _takes_text(make):
        text = spec.partition(':')[2]
        return make(text or None)
    argument_words = [word for word in text.split(',') if word]
    shrink = getattr(module, _SHRINK[function], None) if SMOKE in argument_words else None
    try:
        remaining_words = [word for word in argument_words if word != SMOKE or shrink is None]
        result = make(**parse_arguments(remaining_words, make, hasattr(module, _SHRINK[function])))
        if shrink and function == 'get_sweep':
            result = dataclasses.replace(result, config=_add_word(result.config, SMOKE))
        return shrink(result) or result if shrink else result
    except UserError as error:
        raise UserError(f'{reference}: {error}') from error


def _add_word(spec: str, word: str) -> str:
    """`FILE[:ARGUMENTS]` with a further argument."""
    return f'{spec}{"," if spec.partition(":")[2] else ":"}{word}'


def translate(spec: str, function: str = 'get_config') -> tuple[str, str]:
    """Split `FILE[:ARGUMENTS]` into both, with `OLD_WORDS` replaced."""
    name, _, text = spec.partition(':')
    words = []
    for word in text.split(','):
        meaning = None if '=' in word else _meaning(recipe_name(name), function, word)
        recipe, colon, remaining = (meaning or '').rpartition(':')
        if colon:
            name = _beside(name, recipe)
        words.append(word if meaning is None else remaining)
    return name, ','.join(filter(None, words))


def _meaning(recipe: str, function: str, word: str) -> str | None:
    for key in (f'{recipe} {function}', recipe, ''):
        for old, new in OLD_WORDS.get(key, {}).items():
            if match := re.fullmatch(old, word):
                return match.expand(new)
    return None


def recipe_name(path: str) -> str:
    """`vit/digits` for `experiments/vit/digits.py`, wherever the folder is."""
    return '/'.join(pathlib.PurePath(path.removesuffix('.py')).parts[-2:])


def _beside(path: str, recipe: str) -> str:
    """Return the path of another recipe, written like `path`."""
    suffix = '.py' if path.endswith('.py') else ''
    return f'{path.removesuffix(suffix).removesuffix(recipe_name(path))}{recipe}{suffix}'


def _takes_text(function: Callable) -> bool:
    """Return whether a function parses its argument itself."""
    return list(parameters(function)) == [_TEXT]


def parse_arguments(
    words: Iterable[str], function: Callable, has_smoke: bool = False
) -> dict[str, Any]:
    """Return the keywords of a function from words such as `B/16` and `epochs=300`.

    Args:
      words: Arguments, of which one may have no name, for the first parameter; several if that is a
        tuple.
      function: Its parameters have defaults.
      has_smoke: Whether `smoke` is a word, too; for messages.

    Raises:
      UserError: for an unknown argument, or a value of the wrong type.
    """
    declared = parameters(function)
    other_words = (SMOKE,) if has_smoke else ()
    keywords: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition('=')
        if not equals and isinstance(getattr(declared.get(word), 'default', None), bool):
            value = 'true'
        elif not equals:
            name, value = _first(declared, keywords, word, other_words), word
        if name not in declared:
            raise UserError(nearest('argument', name, (*declared, *other_words)))
        several = isinstance(declared[name].default, tuple)
        if name in keywords and not several:
            raise UserError(f'two values for {name}')
        parsed = _parse(name, value, declared, other_words if not equals else ())
        keywords[name] = (*keywords.get(name, ()), parsed) if several else parsed
    return keywords


def _first(
    declared: Parameters, keywords: dict[str, Any], word: str, other_words: tuple[str, ...]
) -> str:
    """Return the name of the first parameter, for a word without one."""
    if not declared and not other_words:
        raise UserError(f'takes no argument; leave out {word}')
    if not declared:
        raise UserError(nearest('argument', word, other_words))
    name = next(iter(declared))
    if name in keywords and not isinstance(declared[name].default, tuple):
        raise UserError(
            f'{nearest("argument", word, declared)}: write {describe_parameters(declared)}'
        )
    return name


def _parse(name: str, text: str, declared: Parameters, other_words: tuple[str, ...]) -> Any:
    parameter = declared[name]
    kind = type(parameter.default)
    kind = str if kind in (type(None), tuple) else kind
    try:
        value = _BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        described = describe_parameters(declared)
        raise UserError(
            f'{name}={text}: not {_NOUNS[kind]}; the arguments are {described}'
        ) from error
    if (choices := choices_of(parameter)) and value not in choices:
        raise UserError(nearest(name, text, [*map(str, choices), *other_words]))
    return value


_NOUNS = {bool: 'true or false', int: 'a whole number', float: 'a number'}


def choices_of(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Return the values of a `Literal` or of a tuple; none for another parameter."""
    if isinstance(parameter.default, tuple):
        return parameter.default
    annotation = parameter.annotation
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def describe_parameters(declared: Parameters) -> str:
    """`variant=S/16, epochs=90`: parameters with their defaults, or their choices."""
    return ', '.join(
        f'{name}={"|".join(map(str, choices_of(p))) or p.default}' for name, p in declared.items()
    )


def arguments(module: types.ModuleType) -> list[str]:
    """Return the arguments of a recipe with their defaults or choices, and `smoke`."""
    descriptions: list[str] = []
    for function, shrink in _SHRINK.items():
        if (make := getattr(module, function, None)) is None:
            continue
        if _takes_text(make):
            descriptions.append('...')
        else:
            descriptions += [describe_parameters({name: p}) for name, p in parameters(make).items()]
        descriptions += [SMOKE] * hasattr(module, shrink)
    return list(dict.fromkeys(descriptions))


def argument_with_choice(spec: str, value: str) -> str:
    """Return `FILE:NAME=value` for the argument of a recipe with this choice; empty if none has."""
    name, _ = translate(spec)
    declared = parameters(load_module(name, '--config').get_config)
    return next(
        (f'{name}:{key}={value}' for key, p in declared.items() if value in choices_of(p)), ''
    )


def load_module(name: str, source: str) -> types.ModuleType:
    """Execute a file as a module.

    Args:
      name: File, or recipe of the package; see `experiment_file`.
      source: The flag or key that names it, for messages.

    Raises:
      UserError: if the file is missing or is not Python.
    """
    path = pathlib.Path(name)
    if not path.is_file():
        if (file := experiment_file(name)) is None:
            raise UserError(f'{source}: {missing_experiment(name)}')
        path = file
    spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
    if spec is None or spec.loader is None:
        raise UserError(f'{source}: {str(path)!r} is not a Python file; its name has to end in .py')
    try:
        compile(paths.read_bytes(path), path, 'exec')
    # ValueError for bytes that are not text; the last ones for absurdly deep nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnsuitableFile) as error:
        raise UserError(f'{source}: {str(path)!r} is not valid Python: {error}') from error
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def experiment_file(name: str) -> pathlib.Path | None:
    """Find the file of a recipe such as `vit/digits` or `experiments/vit/digits.py`."""
    path = FOLDER / experiment_name(name)
    path = path.with_name(f'{path.name}.py')
    is_inside = '..' not in path.parts and path.is_relative_to(FOLDER)
    return path if is_inside and path.is_file() else None


def experiment_name(path: str) -> str:
    """Return the name of a recipe, from its path in the repository."""
    return path.removeprefix('experiments/').removesuffix('.py')


def missing_experiment(name: str) -> str:
    """Return the message for a name that is neither a file nor a recipe; suggests the closest."""
    recipes = [
        file.relative_to(FOLDER).with_suffix('').as_posix() for file in FOLDER.glob('*/*.py')
    ]
    close = difflib.get_close_matches(experiment_name(name), recipes, n=1)
    hint = f'; did you mean {close[0]!r}?' if close else ''
    return f'no file {name!r}{hint} (`list experiments` shows the experiments of the package)'
