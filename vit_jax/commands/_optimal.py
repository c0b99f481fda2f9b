"""`scaling optimal`: compute-optimal sizes by three ways, as a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _results
from vit_jax.commands._parser import Parser, align
from vit_jax.commands._pictures import save_figure

if TYPE_CHECKING:
    from vit_jax.scaling.optimal import Analysis
    from vit_jax.scaling.points import Columns


def optimal(argv: Sequence[str]) -> int:
    """Fit the best model size and data of a compute budget: joint law, isoFLOPs, frontier."""
    args = _parser().parse_args(argv)
    from vit_jax.scaling import holdout, points, rows
    from vit_jax.scaling import optimal as lib

    _results.check(args)
    columns = points.Columns(args.n, args.d, args.c, args.y, _results.names(args.by))
    factor = holdout.factor(args.holdout) if args.holdout else 0.0
    ways = lib.Ways(args.target, factor, args.bootstrap)
    curves = points.read(rows.read_csv(args.csv), columns)
    found = [lib.analyze(one, ways) for one in curves if len(one.y)]
    lib.require_law(found)
    _results.show(_summary(found, columns), args.json, lambda: _print(found, columns))
    if args.output:
        from vit_jax.scaling import plots_optimal

        print(save_figure(plots_optimal.draw(found, columns), args.output, '--output'))
    return 0


def _parser() -> Parser:
    parser = Parser('scaling optimal', optimal.__doc__)
    add = parser.add_argument
    add('--csv', metavar='FILE', required=True, help='a table with a header')
    add('--n', metavar='COL', help='model size; two of --n, --d and --c suffice')
    add('--d', metavar='COL', help='data: tokens, or images times their patches')
    add('--c', metavar='COL', help='training FLOPs (default: 6 N D)')
    add('--y', metavar='COL', required=True, help='a loss; 1-COL for one minus an accuracy')
    add('--by', metavar='COL,COL', default='', help='columns that distinguish the curves')
    add('--target', type=float, metavar='C', help='a budget whose optimum is predicted')
    add('--holdout', metavar='4x', help='hold out C above a quarter of the largest')
    _results.add_bootstrap_flag(parser)
    _results.add_json_flag(parser)
    add('--output', metavar='FILE', help='draw contours and parabolas: PNG, SVG or PDF')
    return parser


def _summary(found: Sequence[Analysis], columns: Columns) -> dict[str, Any]:
    from vit_jax.scaling import points

    return {
        'columns': {flag.strip('-'): column for column, flag in columns.flags()},
        'counted': points.conventions(columns),
        'curves': [
            {
                'by': one.points.by,
                'points': len(one.points.y),
                'flops': one.points.cost.words,
                **one.summary,
                'notes': list(one.notes),
                'left_out': list(one.points.left_out),
            }
            for one in found
        ],
    }


def _print(found: Sequence[Analysis], columns: Columns) -> None:
    from vit_jax.scaling import optimal as lib
    from vit_jax.scaling import points
    from vit_jax.scaling.rows import label

    print('L = E + A N^-alpha + B D^-beta; N* ~ C^a, D* ~ C^b')
    print(points.conventions(columns))
    lines = [['curve', 'way', 'a', 'b', 'held out', 'C', 'N*', 'D*', 'loss']]
    for one in found:
        lines += [[label(one.points.by), *_line(way, one)] for way in one.summary]
    print(align(lines, left=2))
    for one in found:
        name = label(one.points.by)
        print(f'{name}: {one.points.cost.words}')
        if law := one.summary['joint']:
            print(f'{name}: ' + ', '.join(f'{k} = {law[k]:.5g}' for k in _LAW))
        for note in (*one.notes, *one.points.left_out):
            print(f'{name}: {note}')
    if any(one.summary['isoflop'] for one in found):
        print(f'isoflop: {lib.BIAS}')


_LAW = ('E', 'A', 'alpha', 'B', 'beta')


def _line(way: str, one: Analysis) -> list[str]:
    law = one.summary[way]
    if law is None:
        return [way, *['-'] * 7]
    target = law.get('target') or {}
    error = law.get('holdout_rmse')
    cells = [_banded(law, name) for name in 'ab']
    predicted = [f'{target["C"]:.3g}' if target else '-']
    predicted += [_banded(target, name) if name in target else '-' for name in ('N', 'D', 'loss')]
    return [way, *cells, '-' if error is None else f'{error:.4f}', *predicted]


def _banded(law: dict[str, Any], name: str) -> str:
    if name not in law['bands']:
        return f'{law[name]:.4g}'
    low, high = law['bands'][name]
    return f'{law[name]:.4g} [{low:.4g}, {high:.4g}]'
