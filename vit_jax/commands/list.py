"""List what a config may name: models and their sizes, tasks, transforms, optimizers and so on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _catalog
from vit_jax.commands._parser import Parser, add_json_flag, align
from vit_jax.errors import UserError, modules, positive_number

if TYPE_CHECKING:
    from vit_jax.interop.hub import Released
    from vit_jax.profiling.variants import Variant

KINDS: dict[str, Callable[[], list[_catalog.Named]]] = {
    'models': partial(_catalog.list_modules, 'vit_jax.models'),
    'tasks': partial(_catalog.list_modules, 'vit_jax.tasks'),
    'sources': partial(_catalog.list_modules, 'vit_jax.data.sources'),
    'transforms': _catalog.transforms,
    'optimizers': _catalog.optimizers,
    'schedules': _catalog.schedules,
    'evaluators': partial(_catalog.list_modules, 'vit_jax.evaluators'),
    'writers': partial(_catalog.list_modules, 'vit_jax.writers'),
}
EXPERIMENTS, KEYS, VARIANTS = 'experiments', 'keys', 'variants'
CHECKPOINTS, COMMANDS = 'checkpoints', 'commands'
MAX_WIDTH, INDENT = 40, 4


def main(argv: Sequence[str]) -> int:
    """Print names with descriptions, or a list of JSON objects."""
    parser = Parser('list', __doc__)
    kinds = [*KINDS, CHECKPOINTS, COMMANDS, EXPERIMENTS, KEYS, VARIANTS]
    parser.add_argument(
        'kind', nargs='?', choices=kinds, help='kind to list (default: the names of all kinds)'
    )
    parser.add_argument(
        'words',
        nargs='*',
        metavar='WORD',
        help='part of the names, or keys, to list (default: all)',
    )
    parser.add_argument(
        '--folder',
        type=pathlib.Path,
        help='folder of your experiments, which are executed to find their arguments',
    )
    parser.add_argument(
        '--image-size',
        type=positive_number,
        default=224,
        metavar='PIXELS',
        help='side of the images of variants (default: 224)',
    )
    add_json_flag(parser)
    args = parser.parse_args(argv)
    if args.kind is None:
        return print_kinds(args.json)
    if args.kind == VARIANTS:
        return print_variants(args.words, args.image_size, args.json)
    if args.kind == CHECKPOINTS:
        return print_checkpoints(args.words, args.json)
    if args.kind == COMMANDS:
        return print_commands(args.words, args.json)
    if args.kind == KEYS:
        return print_keys(args.words, args.json)
    if args.kind == EXPERIMENTS:
        return print_experiments(args.folder, args.words, args.json)
    found = [named for named in KINDS[args.kind]() if matches(named.name, args.words)]
    if args.json:
        print(to_json(found))
        return 0
    require_some(found, args.kind, args.words)
    print('\n'.join(name_lines(found)))
    return 0


def matches(name: str, words: Sequence[str]) -> bool:
    """Whether a name contains one of the words, or there are none."""
    return not words or any(word in name for word in words)


def require_some(found: Sized, kind: str, words: Sequence[str]) -> None:
    """Raise UserError if no name contains one of the words."""
    if words and not found:
        raise UserError(f'list {kind}: no name contains {" or ".join(map(repr, words))}')


def name_lines(found: Sequence[_catalog.Named]) -> Iterator[str]:
    """A line per name, or two per name if some names with their arguments are long."""
    calls = [notation(named) for named in found]
    width = max(map(len, calls), default=0)
    between = f'\n{"":<{INDENT}}' if width > MAX_WIDTH else '  '
    for text, named in zip(calls, found, strict=True):
        yield f'{text if width > MAX_WIDTH else text.ljust(width)}{between}{named.line}'.rstrip()


def notation(named: _catalog.Named) -> str:
    """A name with its arguments: `flip()` for a transform, `FILE:  arg arg` for an experiment."""
    if not named.arguments or named.arguments.startswith('('):
        return named.name + named.arguments
    return f'{named.name}:  {named.arguments}'


def print_kinds(as_json: bool) -> int:
    """Print the names of every kind that can be listed without executing anything."""
    names = {kind: [named.name for named in find()] for kind, find in KINDS.items()}
    if as_json:
        print(json.dumps(names))
        return 0
    print(align([[kind, ' '.join(found)] for kind, found in names.items()], left=2))
    print(f'{CHECKPOINTS}, {COMMANDS}, {EXPERIMENTS}, {KEYS}, {VARIANTS}: name the kind')
    return 0


def print_experiments(folder: pathlib.Path | None, words: Sequence[str], as_json: bool) -> int:
    """Print the configs and sweeps whose names contain a word."""
    found = [one for one in _catalog.experiments(folder) if matches(one.name, words)]
    if as_json:
        print(to_json(found))
        return 0
    require_some(found, EXPERIMENTS, words)
    headings = zip(_catalog.FILE_FUNCTIONS, ('train --config', 'sweep create'), strict=True)
    for function, command in headings:
        if listed := [one for one in found if function in one.functions]:
            print('\n'.join([f'for {command}:', *name_lines(listed)]))
    return 0


def print_commands(words: Sequence[str], as_json: bool) -> int:
    """Print the flags of the commands whose names contain a word, as Markdown."""
    listed = [command for command in _catalog.list_commands() if matches(command.name, words)]
    if as_json:
        print(to_json(listed))
        return 0
    require_some(listed, COMMANDS, words)
    if not words:
        print('# Flags\n\n`make docs` generates this page; `vit-jax list commands` prints it.\n')
        anchors = [f'- [{name}](#{name.replace(" ", "-")})' for name in (c.name for c in listed)]
        print('\n'.join(anchors), end='\n\n')
    print('\n'.join(map(command_section, listed)), end='')
    return 0


def command_section(command: _catalog.Command) -> str:
    """A heading and a table of flags, as Markdown."""
    rows = [(f'`{flag}`', text) for flag, text in command.flags]
    lines = [' | '.join(cell.replace('|', '\\|') for cell in row) for row in rows]
    table = '\n'.join(f'| {line} |' for line in ('argument | meaning', '--- | ---', *lines))
    return f'## {command.name}\n\n{command.line}\n\n{table}\n'


def print_keys(words: Sequence[str], as_json: bool) -> int:
    """Print the config keys whose section, name or meaning contains a word, as Markdown."""
    from vit_jax.config import reference

    found = {}
    for heading, keys in reference.package_keys().items():
        named = [key for key in keys if matches(f'{key.name} {key.text}'.lower(), words)]
        if chosen := keys if matches(heading, words) else named:
            found[heading] = chosen
    if as_json:
        print(json.dumps({k: [dataclasses.asdict(key) for key in v] for k, v in found.items()}))
        return 0
    require_some(found, KEYS, words)
    print(reference.markdown(found), end='')
    return 0


def print_checkpoints(words: Sequence[str], as_json: bool) -> int:
    """Print the released checkpoints whose names contain a word."""
    from vit_jax.interop import hub

    found = [one for one in hub.released_table() if matches(one.name, words)]
    if as_json:
        print(to_json(found))
        return 0
    require_some(found, CHECKPOINTS, words)
    print('\n'.join(checkpoint_lines(found)))
    return 0


def checkpoint_lines(found: Iterable[Released]) -> Iterator[str]:
    """Two lines per checkpoint, its name and its facts, below the page that lists it."""
    for source, members in groupby(found, lambda one: one.source):
        yield source
        for one in members:
            yield f'  {one.name}'
            yield f'    {_facts(one)}'.rstrip()


def _facts(one: Released) -> str:
    model = f'{one.model["name"]} {one.model["variant"]}' if one.model else ''
    count = f'{one.parameters / 1e6:,.1f} M' if one.parameters else ''
    size = f'{one.image_size} px' if one.image_size else ''
    result = '' if one.accuracy is None else f'{one.accuracy} {one.metric}'
    return f'{model:<19}{count:>9}{size:>8}  {one.trained_on:<32}{result}'


def print_variants(words: Sequence[str], image_size: int, as_json: bool) -> int:
    """Print the cost of each variant of the models whose names contain a word."""
    from vit_jax.profiling import variants

    models = [name for name in modules(variants.PACKAGE) if matches(name, words)]
    found = find_variants(models, image_size)
    if as_json:
        print(to_json(found))
        return 0
    require_some(models, VARIANTS, words)
    print(f'{"model":<14}{"variant":<12}{"parameters":>16}{"GFLOPs":>10}')
    for v in found:
        row = f'{v.model:<14}{v.name:<12}{v.parameters:>16,}{2 * v.gmacs:>10.4g}'
        print(row, flush=True)
    print(
        f'two FLOPs per multiply-accumulate; on one image of {image_size} x {image_size}, '
        f'or sentences of {variants.TOKENS} tokens; '
        + ', '.join(f'{key} {size:,}' for key, size in variants.ASSUMED.items())
    )
    return 0


def find_variants(models: Iterable[str], image_size: int) -> Iterator[Variant]:
    """The variants of some models, counted if they are missing from the table."""
    from vit_jax.profiling import variants

    table = variants.read_table() if image_size == variants.IMAGE_SIZE else {}
    for model in models:
        if model in table:
            yield from table[model]
        else:
            yield from variants.count(model, image_size)


def to_json(found: Iterable[Any]) -> str:
    """Dataclasses as a JSON list of objects."""
    return json.dumps([dataclasses.asdict(one) for one in found])
