"""Evaluate an ImageNet classifier on ImageNet-A, -R, -Sketch, -V2, -C (mCE) and ReaL."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, open_model
from vit_jax.commands._parser import (
    Parser,
    add_json_flag,
    align,
    check_output,
    check_picture,
    save_figure,
    write_file,
)
from vit_jax.errors import UserError, positive_number


def main(argv: Sequence[str]) -> int:
    """Print the accuracy on each set that is there, and corruption errors.

    Raises:
      UserError: if there is no set, or the model's classes are not ImageNet's.
    """
    parser = Parser('robustness', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument(
        'sets',
        metavar='DIR|tfds',
        help='folder with the extracted archives of the sets, such as imagenet-a, imagenet-r, '
        'imagenet-c, and val with real.json; or tfds for the prepared data of TFDS',
    )
    parser.add_argument(
        '--batch-size',
        type=positive_number,
        metavar='N',
        help="examples per batch, over all devices (default: the model's)",
    )
    parser.add_argument('--out', metavar='FILE', help='picture to write (PNG, SVG, PDF or JPEG)')
    parser.add_argument('--table', metavar='FILE', help='.csv file with a row per set')
    add_json_flag(parser, ', with the accuracy on each set and the corruption errors')
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    if args.out is not None:
        check_picture(args.out, '--out')
    if args.table is not None:
        if not args.table.lower().endswith('.csv'):
            raise UserError(f'--table {args.table!r}: the name must end in .csv')
        check_output(args.table, '--table')
    from vit_jax.runtime import compile_cache, console
    from vit_jax.trainer import robustness

    sets = robustness.find_sets(args.sets)
    compile_cache.enable()
    trained = open_model(parser, args)
    options = {'batch_size': args.batch_size, 'image_size': image_size(args)}
    rows = []
    with console.progress('sets', len(sets)) as advance:
        for row in robustness.measure(trained, sets, **options):
            rows.append(row)
            advance()
    errors = robustness.corruption_errors(rows)
    if args.out is not None:
        from vit_jax.viz import charts

        figure = charts.draw_robustness(rows, errors, f'Robustness of {trained.source}')
        save_figure(figure, args.out, '--out')
    if args.table is not None:
        from vit_jax.scaling.runs import to_csv

        write_file(args.table, to_csv(rows), '--table')
    if args.json:
        print(json.dumps({'sets': rows, 'corruption_errors': errors}))
        return 0
    print('\n\n'.join(tables(rows, errors)))
    missing = len(robustness.ALEXNET_ERRORS) - len(errors)
    if 'mCE' not in errors and any(row['corruption'] for row in rows):
        print(f'no mCE: {missing} corruptions lack severities', file=sys.stderr)
    for path in filter(None, (args.out, args.table)):
        print(path)
    return 0


def tables(rows: Sequence[Mapping[str, Any]], errors: Mapping[str, float]) -> list[str]:
    """Format a table of the sets, and one of the errors by corruption and severity."""
    cells = [
        [row['set'], f'{row["classes"]:,}', f'{row["images"]:,}', f'{row["accuracy"]:.4f}']
        for row in rows
        if not row['corruption']
    ]
    texts = [align([['set', 'classes', 'images', 'accuracy'], *cells], left=1)] if cells else []
    corrupted: dict[str, dict[int, float]] = {}
    for row in rows:
        if row['corruption']:
            corrupted.setdefault(row['corruption'], {})[row['severity']] = 1 - row['accuracy']
    if not corrupted:
        return texts
    levels = sorted({level for by_level in corrupted.values() for level in by_level})
    lines = [
        [
            name,
            *(f'{by_level[s]:.3f}' if s in by_level else '' for s in levels),
            _cell(errors, name),
        ]
        for name, by_level in corrupted.items()
    ]
    if 'mCE' in errors:
        lines.append(['mCE', *[''] * len(levels), _cell(errors, 'mCE')])
    heading = ['error by severity', *map(str, levels), 'CE']
    return [*texts, align([heading, *lines], left=1)]


def _cell(errors: Mapping[str, float], name: str) -> str:
    return f'{errors[name]:.4f}' if name in errors else ''
