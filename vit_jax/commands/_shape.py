"""`scaling shape`: the optimal width, depth and MLP for a compute budget, from a star sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _results
from vit_jax.commands._parser import Parser, align
from vit_jax.commands._pictures import save_figure
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.scaling.shape import Shapes
    from vit_jax.scaling.star import Star


_FAR = 2.0  # times the largest size that was run, above which an optimum is doubtful


def shape(argv: Sequence[str]) -> int:
    """Fit a star sweep: exponents of width, depth and MLP over compute, and their optimum."""
    args = _parser().parse_args(argv)
    from vit_jax.scaling import rows, star
    from vit_jax.scaling import shape as lib

    _results.check(args)
    names = _results.names(args.shape)
    table = rows.read_csv(args.csv)
    examples = args.examples if args.examples in table[0] else None
    columns = star.Columns(names, args.t, args.y, examples)
    found = star.read(table, columns)
    start = _start(args.start, names, args.target) if args.start else None
    shapes = lib.fit(found, args.bootstrap)
    if not shapes.laws:
        raise UserError(f'no shape is optimal; {"; ".join(shapes.notes)}')
    summary = _summary(found, shapes, args.target, start)
    _results.show(summary, args.json, lambda: _print(summary))
    if args.output:
        from vit_jax.scaling import plots_shape

        figure = plots_shape.draw(found, shapes, columns, args.target)
        print(save_figure(figure, args.output, '--output'))
    return 0


def _parser() -> Parser:
    parser = Parser('scaling shape', shape.__doc__)
    add = parser.add_argument
    add('--csv', metavar='FILE', required=True, help='a table with a header')
    add('--shape', metavar='COL,COL', required=True, help='columns of the dimensions')
    add('--t', metavar='COL', default='flops', help='compute of a run (default: %(default)s)')
    add('--y', metavar='COL', required=True, help='an error or a loss; 1-COL for an accuracy')
    add('--examples', metavar='COL', default='examples_seen', help='for the length of training')
    add('--target', type=float, metavar='T', help='a budget whose optimal shape is predicted')
    add('--start', metavar='V,V@T', help='values of --shape that are optimal for T, to scale')
    _results.add_bootstrap_flag(parser)
    _results.add_json_flag(parser)
    add('--output', metavar='FILE', help='draw the rays: PNG, SVG or PDF')
    return parser


def _start(text: str, names: Sequence[str], target: float | None) -> tuple[dict[str, float], float]:
    """`192,6,768@1e18` -> the shape, and the ratio of the target to its budget."""
    if target is None:
        raise UserError('--start: needs --target')
    try:
        values, _, budget = text.partition('@')
        shape, t = [float(value) for value in values.split(',')], float(budget)
    except ValueError as e:
        raise UserError(f'--start {text!r}: write the values and the budget, as 192,6@1e18') from e
    if len(shape) != len(names) or not all(0 < value < float('inf') for value in (*shape, t)):
        raise UserError(f'--start {text!r}: {len(names)} positive values and a budget are needed')
    return dict(zip(names, shape, strict=True)), target / t


def _summary(
    found: Star,
    shapes: Shapes,
    target: float | None,
    start: tuple[dict[str, float], float] | None,
) -> dict[str, Any]:
    dimensions: dict[str, Any] = {}
    for name, law in shapes.laws.items():
        s, band = shapes.exponent(name)
        one = {**dataclasses.asdict(law), 's': s, 's_band': band, 'runs': len(found.rays[name].x)}
        if target is not None:
            one['optimum'], one['optimum_band'] = shapes.best(name, target)
        dimensions[name] = one
    summary: dict[str, Any] = {
        'center': found.center,
        'dimensions': dimensions,
        'rmse': shapes.rmse,
        'notes': [*found.notes, *shapes.notes],
    }
    if target is None:
        return summary
    for name, one in dimensions.items():
        beyond = one['optimum'] / found.rays[name].x.max()
        if beyond > _FAR:
            summary['notes'].append(f'{name}: its optimum is {beyond:.2g} times the largest run')
    best = found.center | {name: one['optimum'] for name, one in dimensions.items()}
    summary |= {'target': target, 'examples': _examples(found, best, target)}
    if start is not None:
        grown = shapes.scaled({k: v for k, v in start[0].items() if k in shapes.laws}, start[1])
        summary |= {'scaled': grown, 'scaled_examples': _examples(found, start[0] | grown, target)}
    return summary


def _examples(found: Star, best: dict[str, float], target: float) -> float | None:
    cost = found.cost(best)
    return None if cost is None else target / cost


def _print(summary: dict[str, Any]) -> None:
    print('f(x, t) = alpha x^-a + (beta x^b + xi) t^-c + epsilon; x* ~ t^s, s = c / (a + b)')
    grown = summary.get('scaled', {})
    lines = [['dimension', 'center', 'runs', 'a', 'b', 'c', 's']]
    lines[0] += ['x*'] if 'target' in summary else []
    lines[0] += ['scaled'] if grown else []
    for name, one in summary['dimensions'].items():
        numbers = [f'{one[key]:.3g}' for key in 'abc']
        line = [name, f'{summary["center"][name]:g}', str(one['runs']), *numbers]
        line.append(_banded(one['s'], one['s_band']))
        line += [_banded(one['optimum'], one['optimum_band'])] if 'optimum' in one else []
        line += [f'{grown[name]:.4g}'] if grown else []
        lines.append(line)
    print(align(lines, left=1))
    for kind, key in (('x*', 'examples'), ('scaled', 'scaled_examples')):
        if summary.get(key):
            print(f'{kind}: the budget {summary["target"]:.3g} is {summary[key]:.3g} examples')
    print(f'error of the fit: {summary["rmse"]:.2g} of log y')
    for note in summary['notes']:
        print(note)


def _banded(value: float, band: Sequence[float]) -> str:
    return f'{value:.4g} [{band[0]:.4g}, {band[1]:.4g}]' if band else f'{value:.4g}'
