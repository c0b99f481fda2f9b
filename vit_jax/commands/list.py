"""List what a config may name: models and their sizes, tasks, transforms, optimizers and so on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _catalog
from vit_jax.commands._parser import Parser, add_json_flag, align
from vit_jax.errors import UserError, modules, positive_number
from vit_jax.runtime import caches

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
CACHE, CHECKPOINTS, COMMANDS = 'cache', 'checkpoints', 'commands'
MAX_WIDTH, INDENT = 40, 4


def main(argv: Sequence[str]) -> int:
    """Print names with descriptions, or a list of JSON objects."""
    parser = Parser('list', __doc__)
    kinds = [*KINDS, CACHE, CHECKPOINTS, COMMANDS, EXPERIMENTS, KEYS, VARIANTS]
    parser.add_argument(
        'kind', nargs='?', choices=kinds, help='kind to list (default: the names of all kinds)'
    )
    parser.add_argument(
        'patterns',
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
    parser.add_argument(
        '--clear',
        action='store_true',
        help='remove the listed entries of the cache, which no run may be using',
    )
    add_json_flag(parser)
    args = parser.parse_args(argv)
    if args.clear and args.kind != CACHE:
        raise UserError('--clear removes entries of the cache: list cache --clear')
    if args.kind == CACHE:
        return print_cache(args.patterns, args.clear, args.json)
    if args.kind is None:
        return print_kinds(args.json)
    if args.kind == VARIANTS:
        return print_variants(args.patterns, args.image_size, args.json)
    if args.kind == CHECKPOINTS:
        return print_checkpoints(args.patterns, args.json)
    if args.kind == COMMANDS:
        return print_commands(args.patterns, args.json)
    if args.kind == KEYS:
        return print_keys(args.patterns, args.json)
    if args.kind == EXPERIMENTS:
        return print_experiments(args.folder, args.patterns, args.json)
    entries = [entry for entry in KINDS[args.kind]() if matches(entry.name, args.patterns)]
    if args.json:
        print(to_json(entries))
        return 0
    require_some(entries, args.kind, args.patterns)
    print('\n'.join(name_lines(entries)))
    return 0


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name contains one of the patterns, or there are none."""
    return not patterns or any(pattern in name for pattern in patterns)


def require_some(entries: Sized, kind: str, patterns: Sequence[str]) -> None:
    """Raise UserError if none of the names contains a pattern."""
    if patterns and not entries:
        raise UserError(
            f'list {kind}: none of the names contains {" or ".join(map(repr, patterns))}'
        )


def name_lines(entries: Sequence[_catalog.Named]) -> Iterator[str]:
    """Yield a line per name, or two per name if some names with their arguments are long."""
    calls = [notation(entry) for entry in entries]
    width = max(map(len, calls), default=0)
    between = f'\n{"":<{INDENT}}' if width > MAX_WIDTH else '  '
    for text, entry in zip(calls, entries, strict=True):
        yield f'{text if width > MAX_WIDTH else text.ljust(width)}{between}{entry.line}'.rstrip()


def notation(entry: _catalog.Named) -> str:
    """Write a name with its arguments: `flip()` (transform), `FILE:  arg arg` (experiment)."""
    if not entry.arguments or entry.arguments.startswith('('):
        return entry.name + entry.arguments
    return f'{entry.name}:  {entry.arguments}'


def print_kinds(as_json: bool) -> int:
    """Print the names of every kind that can be listed without executing anything."""
    names = {kind: [entry.name for entry in find()] for kind, find in KINDS.items()}
    if as_json:
        print(json.dumps(names))
        return 0
    print(align([[kind, ' '.join(members)] for kind, members in names.items()], left=2))
    print(f'{CACHE}, {CHECKPOINTS}, {COMMANDS}, {EXPERIMENTS}, {KEYS}, {VARIANTS}: name the kind')
    return 0


def print_experiments(folder: pathlib.Path | None, patterns: Sequence[str], as_json: bool) -> int:
    """Print the configs and sweeps whose names contain a pattern."""
    entries = [entry for entry in _catalog.experiments(folder) if matches(entry.name, patterns)]
    if as_json:
        print(to_json(entries))
        return 0
    require_some(entries, EXPERIMENTS, patterns)
    headings = zip(_catalog.FILE_FUNCTIONS, ('train --config', 'sweep create'), strict=True)
    for function, command in headings:
        if runnable := [entry for entry in entries if function in entry.functions]:
            print('\n'.join([f'for {command}:', *name_lines(runnable)]))
    return 0


def print_commands(patterns: Sequence[str], as_json: bool) -> int:
    """Print the flags of the commands whose names contain a pattern, as Markdown."""
    matching_commands = [
        command for command in _catalog.list_commands() if matches(command.name, patterns)
    ]
    if as_json:
        print(to_json(matching_commands))
        return 0
    require_some(matching_commands, COMMANDS, patterns)
    if not patterns:
        print('# Flags\n\n`make docs` generates this page; `vit-jax list commands` prints it.\n')
        anchors = [
            f'- [{name}](#{name.replace(" ", "-")})' for name in (c.name for c in matching_commands)
        ]
        print('\n'.join(anchors), end='\n\n')
    print('\n'.join(map(command_section, matching_commands)), end='')
    return 0


def command_section(command: _catalog.Command) -> str:
    """Format a heading and a table of flags as Markdown."""
    rows = [(f'`{flag}`', text) for flag, text in command.flags]
    lines = [' | '.join(cell.replace('|', '\\|') for cell in row) for row in rows]
    table = '\n'.join(f'| {line} |' for line in ('argument | meaning', '--- | ---', *lines))
    return f'## {command.name}\n\n{command.line}\n\n{table}\n'


def print_keys(patterns: Sequence[str], as_json: bool) -> int:
    """Print the config keys whose section, name or meaning contains a pattern, as Markdown."""
    from vit_jax.commands import _config_keys

    sections = {}
    for heading, keys in _config_keys.package_keys().items():
        matching = [key for key in keys if matches(f'{key.name} {key.text}'.lower(), patterns)]
        if section_keys := keys if matches(heading, patterns) else matching:
            sections[heading] = section_keys
    if as_json:
        print(json.dumps({k: [dataclasses.asdict(key) for key in v] for k, v in sections.items()}))
        return 0
    require_some(sections, KEYS, patterns)
    print(_config_keys.markdown(sections), end='')
    return 0


def print_checkpoints(patterns: Sequence[str], as_json: bool) -> int:
    """Print the released checkpoints whose names contain a pattern."""
    from vit_jax.interop import hub

    released = [
        checkpoint for checkpoint in hub.released_table() if matches(checkpoint.name, patterns)
    ]
    if as_json:
        print(to_json(released))
        return 0
    require_some(released, CHECKPOINTS, patterns)
    print('\n'.join(checkpoint_lines(released)))
    return 0


def print_cache(patterns: Sequence[str], clear: bool, as_json: bool) -> int:
    """Print the size of each kind of cached files, or the entries of the kinds that are named.

    Args:
      patterns: Parts of the names of kinds.
      clear: Whether to remove what is listed.
      as_json: Whether to print all entries as JSON.
    """
    kinds = [kind for kind in caches.KINDS if matches(kind, patterns)]
    require_some(kinds, CACHE, patterns)
    entries = {kind: caches.entries(kind) for kind in kinds}
    if clear:
        for kind in kinds:
            caches.clear(kind)
    if as_json:
        print(to_json(chain.from_iterable(entries.values())))
        return 0
    rows = [['kind', 'entries', 'GB', 'limit', 'last use', 'content']]
    for kind, kind_entries in entries.items():
        last = _days_ago(kind_entries[-1].used) if kind_entries else '-'
        size, limit = (
            sum(entry.bytes for entry in kind_entries) / 1e9,
            caches.limit_bytes(kind) / 1e9,
        )
        numbers = [f'{len(kind_entries):,}', f'{size:.3f}', f'{limit:g}', last]
        rows.append([kind, *numbers, caches.KINDS[kind].meaning])
    print(align(rows, left=1, last_left=True))
    for entry in chain.from_iterable(entries.values()) if patterns and not clear else ():
        print(f'{entry.bytes / 1e6:,.1f} MB, {_days_ago(entry.used)}: {entry.origin or entry.path}')
    print('removed' if clear else f'in {caches.folder("")}; list cache [KIND...] --clear removes')
    return 0


def _days_ago(moment: float) -> str:
    days = int((time.time() - moment) / 86400)
    return 'today' if days < 1 else f'{days} day{"s" * (days > 1)} ago'


def checkpoint_lines(released: Iterable[Released]) -> Iterator[str]:
    """Yield two lines per checkpoint, its name and its facts, below the page that lists it."""
    for source, members in groupby(released, lambda checkpoint: checkpoint.source):
        yield source
        for checkpoint in members:
            yield f'  {checkpoint.name}'
            yield f'    {_format_facts(checkpoint)}'.rstrip()


def _format_facts(checkpoint: Released) -> str:
    model = f'{checkpoint.model["name"]} {checkpoint.model["variant"]}' if checkpoint.model else ''
    count = f'{checkpoint.parameters / 1e6:,.1f} M' if checkpoint.parameters else ''
    size = f'{checkpoint.image_size} px' if checkpoint.image_size else ''
    result = '' if checkpoint.accuracy is None else f'{checkpoint.accuracy} {checkpoint.metric}'
    return f'{model:<19}{count:>9}{size:>8}  {checkpoint.trained_on:<32}{result}'


def print_variants(patterns: Sequence[str], image_size: int, as_json: bool) -> int:
    """Print the cost of each variant of the models whose names contain a pattern."""
    from vit_jax.profiling import variants

    models = [name for name in modules(variants.PACKAGE) if matches(name, patterns)]
    counted = find_variants(models, image_size)
    if as_json:
        print(to_json(counted))
        return 0
    require_some(models, VARIANTS, patterns)
    rows = [['model', 'variant', 'parameters', 'GFLOPs']]
    rows += [[v.model, v.name, f'{v.parameters:,}', f'{2 * v.gmacs:.4g}'] for v in counted]
    print(align(rows, left=2))
    print(
        f'two FLOPs per multiply-accumulate; on one image of {image_size} x {image_size}, '
        f'or sentences of {variants.TOKENS} tokens; '
        + ', '.join(f'{key} {size:,}' for key, size in variants.ASSUMED.items())
    )
    return 0


def find_variants(models: Iterable[str], image_size: int) -> Iterator[Variant]:
    """Yield the variants of some models, counted if they are missing from the table."""
    from vit_jax.profiling import variants

    table = variants.read_table() if image_size == variants.IMAGE_SIZE else {}
    for model in models:
        if model in table:
            yield from table[model]
        else:
            yield from variants.count(model, image_size)


def to_json(entries: Iterable[Any]) -> str:
    """Format dataclasses as a JSON list of objects."""
    return json.dumps([dataclasses.asdict(entry) for entry in entries])
