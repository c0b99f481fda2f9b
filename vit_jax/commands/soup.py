"""Average models of one architecture (a soup), or evaluate along the line between two (WiSE-FT)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import MODEL
from vit_jax.commands._parser import Parser, add_allow_flag, add_json_flag, align
from vit_jax.commands.convert import WEIGHTS_FORMS, check_target, write
from vit_jax.errors import UserError, positive_number


def main(argv: Sequence[str]) -> int:
    """Write the average, or print the results at points of the line.

    Raises:
      UserError: if the models cannot be averaged, or there is nothing to do.
    """
    parser = Parser('soup', __doc__)
    parser.add_argument('models', nargs='+', metavar='MODEL', help=MODEL)
    parser.add_argument(
        '--weights',
        type=parse_weights,
        metavar='W,W,...',
        help='weight of each model, with sum 1 (default: equal)',
    )
    parser.add_argument('--out', metavar='DST', help=f'the average: {WEIGHTS_FORMS}')
    parser.add_argument(
        '--line',
        type=positive_number,
        metavar='N',
        help='number of equal steps from the first model to the second, each evaluated on --source '
        "and --split, or on the first run's data",
    )
    parser.add_argument('--source', help="source of the data, such as 'folder:PATH'")
    parser.add_argument('--split', help="split of the data, such as 'test'")
    parser.add_argument(
        '--evaluator',
        action='append',
        default=[],
        metavar='NAME',
        help="evaluator such as 'zero_shot'; may be repeated",
    )
    add_json_flag(parser, ', with the results at each point of --line')
    add_allow_flag(parser)
    args = parser.parse_args(argv)
    if len(args.models) < 2:
        raise UserError('soup: name two models or more')
    if (args.out is None) == (args.line is None):
        raise UserError('soup: give either --out, to write the average, or --line')
    if args.line is not None:
        return evaluate_line(args)
    check_target(args.out, '--out')
    from vit_jax.inference import load, soup

    soup.check_weights(args.weights, len(args.models))
    read = [load.read(model, allowed=args.allow) for model in args.models]
    write(soup.mix(read, args.weights), args.out, 'average')
    return 0


def evaluate_line(args: argparse.Namespace) -> int:
    """Evaluate models between two, and print a row for each."""
    if len(args.models) != 2 or args.weights is not None:
        raise UserError('soup --line: name two models, without --weights')
    from vit_jax.inference import load, soup
    from vit_jax.runtime import compile_cache, mesh
    from vit_jax.trainer import measure

    mesh.usable_devices()
    compile_cache.enable()
    ends = [load.open_model(model, allowed=args.allow) for model in args.models]
    middle = soup.mix(ends)
    prepared = measure.prepare(
        middle, source=args.source, split=args.split, evaluators=args.evaluator
    )
    for note in middle.notes:
        print(f'note: {note}', file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for point in range(args.line + 1):
        share = point / args.line
        mixed = soup.mix(ends, (1 - share, share))
        trained = dataclasses.replace(
            prepared.trained, params=mixed.params, collections=mixed.collections
        )
        results = dataclasses.replace(prepared, trained=trained).run()
        rows.append({'weight': share, **results})
    if args.json:
        print(json.dumps(rows))
        return 0
    names = [name for name in rows[0] if name != 'weight']
    cells = [[f'{row["weight"]:.2f}', *(f'{row[name]:.4f}' for name in names)] for row in rows]
    print(align([['weight of the second', *names], *cells], left=0))
    return 0


def parse_weights(text: str) -> tuple[float, ...]:
    """Parse '.5,.5'; raise UserError for anything but numbers."""
    try:
        return tuple(float(word) for word in text.split(','))
    except ValueError as error:
        raise UserError(f'--weights {text!r}: write numbers, such as .5,.5') from error
