"""List what a config may name: models and their sizes, tasks, transforms, optimizers and so on."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import Parser, align
from vit_jax.config import reference
from vit_jax.errors import UserError, modules, positive

if TYPE_CHECKING:
    from vit_jax.interop.hub import Released
    from vit_jax.profiling.count_variants import Variant

KINDS: dict[str, Callable[[], list[reference.Named]]] = {
    'models': partial(reference.list_modules, 'vit_jax.models'),
    'tasks': partial(reference.list_modules, 'vit_jax.tasks'),
    'sources': partial(reference.list_modules, 'vit_jax.data.sources'),
    'transforms': reference.transforms,
    'optimizers': reference.optimizers,
    'schedules': reference.schedules,
    'evaluators': partial(reference.list_modules, 'vit_jax.evaluators'),
    'writers': partial(reference.list_modules, 'vit_jax.writers'),
}
EXPERIMENTS, KEYS, VARIANTS = 'experiments', 'keys', 'variants'
CHECKPOINTS = 'checkpoints'
WIDTH, INDENT = 40, 4


def main(argv: Sequence[str]) -> int:
    """Prints names and descriptions as they are found; with `--json` a list of objects."""
    parser = Parser('list', __doc__)
    kinds = [*KINDS, CHECKPOINTS, EXPERIMENTS, KEYS, VARIANTS]
    parser.add_argument('kind', nargs='?', choices=kinds, help='by default, the names of all')
    parser.add_argument('words', nargs='*', metavar='WORD', help='only names that contain one')
    parser.add_argument(
        '--folder',
        type=pathlib.Path,
        help='of your own experiments, which are executed to see their arguments',
    )
    parser.add_argument(
        '--image-size',
        type=positive,
        default=224,
        metavar='PIXELS',
        help='of the variants: 224',
    )
    parser.add_argument('--json', action='store_true', help='print JSON only')
    args = parser.parse_args(argv)
    if args.kind is None:
        return print_kinds(args.json)
    if args.kind == VARIANTS:
        return print_variants(args.words, args.image_size, args.json)
    if args.kind == CHECKPOINTS:
        return print_checkpoints(args.words, args.json)
    if args.kind == KEYS:
        return print_keys(args.words, args.json)
    are_files = args.kind == EXPERIMENTS
    found = reference.experiments(args.folder) if are_files else KINDS[args.kind]()
    found = [named for named in found if chosen(named.name, args.words)]
    if args.json:
        print(to_json(found))
        return 0
    require_some(found, args.kind, args.words)
    print('\n'.join(lines(found)))
    return 0


def chosen(name: str, words: Sequence[str]) -> bool:
    """Whether a name contains one of the words, or there are none."""
    return not words or any(word in name for word in words)


def require_some(found: Sized, kind: str, words: Sequence[str]) -> None:
    """Raise UserError if no name contains one of the words."""
    if words and not found:
        raise UserError(f'list {kind}: no name contains {" or ".join(map(repr, words))}')


def lines(found: Sequence[reference.Named]) -> Iterator[str]:
    """A line for each; two lines if the names and arguments of some are long."""
    calls = [call(named) for named in found]
    width = max(map(len, calls), default=0)
    between = f'\n{"":<{INDENT}}' if width > WIDTH else '  '
    for text, named in zip(calls, found, strict=True):
        yield f'{text if width > WIDTH else text.ljust(width)}{between}{named.line}'.rstrip()


def call(named: reference.Named) -> str:
    """Its notation in a config: `flip()` for a transform, `FILE:arg arg` for an experiment."""
    if not named.arguments or named.arguments.startswith('('):
        return named.name + named.arguments
    return f'{named.name}:  {named.arguments}'


def print_kinds(as_json: bool) -> int:
    """Print the names of every kind that needs no execution or computation."""
    names = {kind: [named.name for named in find()] for kind, find in KINDS.items()}
    if as_json:
        print(json.dumps(names))
        return 0
    print(align([[kind, ' '.join(found)] for kind, found in names.items()], left=2))
    print(f'{CHECKPOINTS}, {EXPERIMENTS}, {KEYS}, {VARIANTS}: name the kind')
    return 0


def print_keys(words: Sequence[str], as_json: bool) -> int:
    """Print the keys of a config as Markdown, for the sections whose headings have a word."""
    from vit_jax.config import reference

    found = {k: v for k, v in reference.package_keys().items() if chosen(k, words)}
    if as_json:
        print(json.dumps({k: [dataclasses.asdict(key) for key in v] for k, v in found.items()}))
        return 0
    require_some(found, KEYS, words)
    print(reference.markdown(found), end='')
    return 0


def print_checkpoints(words: Sequence[str], as_json: bool) -> int:
    """Print the released checkpoints whose names contain a word."""
    from vit_jax.interop import hub

    found = [one for one in hub.released_table() if chosen(one.name, words)]
    if as_json:
        print(to_json(found))
        return 0
    require_some(found, CHECKPOINTS, words)
    print('\n'.join(checkpoint_lines(found)))
    return 0


def checkpoint_lines(found: Iterable[Released]) -> Iterator[str]:
    """Two lines for each checkpoint, its name and its facts, below the page they are from."""
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
    """Print the cost of the sizes of models whose names contain a word, a row at a time."""
    from vit_jax.profiling import count_variants

    models = [name for name in modules(count_variants.PACKAGE) if chosen(name, words)]
    found = variants_of(models, image_size)
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
        f'or sentences of {count_variants.TOKENS} tokens; '
        + ', '.join(f'{key} {size:,}' for key, size in count_variants.ASSUMED.items())
    )
    return 0


def variants_of(models: Iterable[str], image_size: int) -> Iterator[Variant]:
    """The variants of some models, counted if the table does not have them."""
    from vit_jax.profiling import count_variants

    table = count_variants.read_table() if image_size == count_variants.IMAGE_SIZE else {}
    for model in models:
        if model in table:
            yield from table[model]
        else:
            from vit_jax.profiling.count_variants import count

            yield from count(model, image_size)


def to_json(found: Iterable[Any]) -> str:
    """A list of objects."""
    return json.dumps([dataclasses.asdict(one) for one in found])
