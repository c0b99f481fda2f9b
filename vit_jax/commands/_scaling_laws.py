"""Subcommands of `scaling` for laws of several variables: `study`, `shape` and `optimal`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import (
    DEVICE_HELP,
    MFU_HELP,
    STORAGE_HELP,
    Parser,
    add_json_flag,
    align,
    save_figure,
    write_json,
)
from vit_jax.config import recipes
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.scaling.optimal import Analysis
    from vit_jax.scaling.points import Columns
    from vit_jax.scaling.shape import ShapeFit, StarSweep
    from vit_jax.sweeps.isoflop import Isoflop, StudyCost, StudyRun

COMMAND = 'scaling study'
FAR = 2.0  # optimum over the largest size of a run above which it is doubtful
LAW = ('E', 'A', 'alpha', 'B', 'beta')


def study(argv: Sequence[str]) -> int:
    """Price a family of shapes at several budgets; queue its trials with --study NAME."""
    args = _study_parser().parse_args(argv)
    from vit_jax.commands.sweep import require_packages
    from vit_jax.sweeps import isoflop

    if args.study is not None:
        require_packages()
    family = read_study(args)
    cost = isoflop.study_cost(family)
    print(align(plan_table(isoflop.runs(family)), left=0))
    for line in (*cost_lines(family, cost), duration_line(family, cost, args)):
        print(line)
    if args.study is None:
        print('nothing was created; --study NAME queues these trials')
        return 0
    from vit_jax.sweeps.study import create

    created = create(family.sweep(), args.study, args.storage, args.workdir)
    count = len(created.sweep.queue())
    print(f'created {created.name}: {count} trials, runs in {created.folder}')
    print(f'work on it: python -m vit_jax sweep work {created.name}')
    return 0


def _study_parser() -> Parser:
    parser = Parser(COMMAND, study.__doc__)
    add = parser.add_argument
    add(
        'file',
        metavar='FILE[:ARG]',
        help='study file, which is executed; its get_sweep returns an Isoflop',
    )
    add('--budget', metavar='C,C', help="FLOPs per run (default: the file's budgets)")
    add('--study', metavar='NAME', help='name of the study to create, for sweep work NAME')
    add('--storage', default='', metavar='URL', help=STORAGE_HELP)
    add('--workdir', metavar='DIR', help='folder of all runs (default: runs/NAME)')
    add('--device', default='TPU v3', metavar='KIND', help=DEVICE_HELP)
    add('--mfu', type=float, default=0.4, help=MFU_HELP)
    add('--measure', action='store_true', help='time a few steps of each shape on this machine')
    return parser


def read_study(args: argparse.Namespace) -> Isoflop:
    """Read the study of the file, with the budgets of the flag.

    Raises:
      UserError: The file does not have a study, or a budget is not a number.
    """
    from vit_jax.sweeps.isoflop import Isoflop

    family = recipes.run_file(args.file, 'get_sweep', COMMAND)
    if not isinstance(family, Isoflop):
        raise UserError(
            f'{COMMAND}: get_sweep of {args.file!r} does not return an Isoflop: use sweep create'
        )
    if args.budget is None:
        return family
    try:
        budgets = tuple(float(text) for text in args.budget.split(','))
    except ValueError:
        raise UserError(f'--budget {args.budget!r}: write FLOPs, such as 1e15,1e16') from None
    return dataclasses.replace(family, budgets=budgets)


def plan_table(runs: Sequence[StudyRun]) -> list[list[str]]:
    """Tabulate the plan: headings, then a row for each budget and shape."""
    names = list(runs[0].shape)
    headings = ['budget', *(name.rpartition('.')[2] for name in names), 'parameters', 'batch']
    table = [[*headings, 'steps', 'warm-up', 'cooldown', 'examples', 'FLOPs', 'off', 'seeds']]
    for run in (run for run in runs if not run.seed):
        seeds = sum(r.shape is run.shape and r.budget == run.budget for r in runs)
        plan = run.plan
        counts = (plan.parameters, plan.batch_size, plan.steps, run.warmup, run.cooldown)
        table.append(
            [f'{run.budget:g}', *(str(run.shape[name]) for name in names)]
            + [f'{n:,.0f}' for n in (*counts, plan.examples)]
            + [f'{plan.flops:.4g}', f'{plan.flops / run.budget - 1:+.2%}', str(seeds)]
        )
    return table


def cost_lines(family: Isoflop, cost: StudyCost) -> list[str]:
    """Describe the cost of the study, its branches and its seeds."""
    from vit_jax.sweeps import isoflop

    count = len(isoflop.runs(family))
    lines = [f'{count} runs: {cost.separate:.4g} FLOPs, forward and backward']
    if cost.trunks:
        lines.append(
            f'as branches of {cost.trunks} trunks at a constant rate: {cost.trained:.4g} FLOPs, '
            f'{cost.trained / cost.separate:.0%} of the above'
        )
    if cost.seeds:
        lines.append(
            f'seeds after the first: {cost.seeds:.4g} FLOPs, {cost.seeds / cost.trained:.0%} of '
            'the training'
        )
    return lines


def duration_line(family: Isoflop, cost: StudyCost, args: argparse.Namespace) -> str:
    """Describe the duration, by the device's peak or, with `--measure`, by timing each shape."""
    from vit_jax.profiling.cost import Machine

    if not args.measure:
        spent = Machine(args.device, args.mfu).chip_hours(cost.trained)
        amount = f'{spent:.3g}' if spent >= 0.001 else 'less than 0.001'
        return f'{amount} chip-hours of {args.device} at {args.mfu:.0%} of the peak'
    from vit_jax.sweeps import isoflop

    rates = isoflop.measure_speed(family)
    spent = sum(n / rate for n, rate in zip(cost.examples, rates, strict=True)) / 3600
    rates_text = ', '.join(f'{rate:,.0f}' for rate in rates)
    return (
        f'{spent:.3g} hours on this machine, {cost.trained / spent / 3600:.3g} FLOP/s, without '
        f'evaluations and start-up; examples/s of each shape: {rates_text}'
    )


def shape(argv: Sequence[str]) -> int:
    """Fit a star sweep: exponents of width, depth and MLP over compute, and their optimum."""
    args = _shape_parser().parse_args(argv)
    from vit_jax.scaling import rows
    from vit_jax.scaling.shape import StarColumns, fit_shapes, read_star

    check_fit_flags(args)
    names = parse_names(args.shape)
    table = rows.read_csv(args.csv)
    examples = args.examples if args.examples in table[0] else None
    columns = StarColumns(names, args.t, args.y, examples)
    star = read_star(table, columns)
    start = _shape_start(args.start, names, args.target) if args.start else None
    shapes = fit_shapes(star, args.bootstrap)
    if not shapes.laws:
        raise UserError(f'none of the dimensions has an optimum: {"; ".join(shapes.notes)}')
    summary = _shape_summary(star, shapes, args.target, start)
    if not write_json(summary, args.json):
        _print_shape(summary)
    if args.out:
        from vit_jax.scaling import plots_optimal

        figure = plots_optimal.draw_shape(star, shapes, columns, args.target)
        print(save_figure(figure, args.out, '--out'))
    return 0


def _shape_parser() -> Parser:
    parser = Parser('scaling shape', shape.__doc__)
    add = parser.add_argument
    add('--csv', metavar='FILE', required=True, help='table with a header')
    add('--shape', metavar='COL,COL', required=True, help='columns of the dimensions')
    add(
        '--t',
        metavar='COL',
        default='flops',
        help='column of the compute of a run (default: %(default)s)',
    )
    add(
        '--y',
        metavar='COL',
        required=True,
        help='column of an error or a loss; 1-COL for an accuracy',
    )
    examples = 'column of the examples of a run (default: %(default)s)'
    add('--examples', metavar='COL', default='examples_seen', help=examples)
    add('--target', type=float, metavar='T', help='budget for which the optimal shape is predicted')
    add('--start', metavar='V,V@T', help='optimal values of --shape at the budget T, to scale up')
    add_bootstrap_flag(parser)
    add_json_flag(parser, former_file=True)
    add('--out', metavar='FILE', help='picture of the rays: PNG, SVG or PDF')
    return parser


def _shape_start(
    text: str, names: Sequence[str], target: float | None
) -> tuple[dict[str, float], float]:
    """Parse `192,6,768@1e18` into a shape and the ratio of the target to its budget."""
    if target is None:
        raise UserError('--start needs --target: give the budget to scale to')
    try:
        values, _, budget = text.partition('@')
        shape, t = [float(value) for value in values.split(',')], float(budget)
    except ValueError as e:
        raise UserError(f'--start {text!r}: write values and budget, such as 192,6@1e18') from e
    if len(shape) != len(names) or not all(0 < value < float('inf') for value in (*shape, t)):
        raise UserError(f'--start {text!r}: give {len(names)} positive values and a budget')
    return dict(zip(names, shape, strict=True)), target / t


def _shape_summary(
    star: StarSweep,
    shapes: ShapeFit,
    target: float | None,
    start: tuple[dict[str, float], float] | None,
) -> dict[str, Any]:
    dimensions: dict[str, Any] = {}
    for name, law in shapes.laws.items():
        s, band = shapes.exponent(name)
        dimension = {
            **dataclasses.asdict(law),
            's': s,
            's_band': band,
            'runs': len(star.rays[name].x),
        }
        if target is not None:
            dimension['optimum'], dimension['optimum_band'] = shapes.best(name, target)
        dimensions[name] = dimension
    summary: dict[str, Any] = {
        'center': star.center,
        'dimensions': dimensions,
        'rmse': shapes.rmse,
        'notes': [*star.notes, *shapes.notes],
    }
    if target is None:
        return summary
    for name, dimension in dimensions.items():
        beyond = dimension['optimum'] / star.rays[name].x.max()
        if beyond > FAR:
            summary['notes'].append(f'{name}: its optimum is {beyond:.2g} times the largest run')
    best = star.center | {name: dimension['optimum'] for name, dimension in dimensions.items()}
    summary |= {'target': target, 'examples': _affordable_examples(star, best, target)}
    if start is not None:
        grown = shapes.scaled({k: v for k, v in start[0].items() if k in shapes.laws}, start[1])
        summary |= {
            'scaled': grown,
            'scaled_examples': _affordable_examples(star, start[0] | grown, target),
        }
    return summary


def _affordable_examples(star: StarSweep, best: dict[str, float], target: float) -> float | None:
    cost = star.cost(best)
    return None if cost is None else target / cost


def _print_shape(summary: dict[str, Any]) -> None:
    print('f(x, t) = alpha x^-a + (beta x^b + xi) t^-c + epsilon; x* ~ t^s, s = c / (a + b)')
    grown = summary.get('scaled', {})
    lines = [['dimension', 'center', 'runs', 'a', 'b', 'c', 's']]
    lines[0] += ['x*'] if 'target' in summary else []
    lines[0] += ['scaled'] if grown else []
    for name, dimension in summary['dimensions'].items():
        numbers = [f'{dimension[key]:.3g}' for key in 'abc']
        line = [name, f'{summary["center"][name]:g}', str(dimension['runs']), *numbers]
        line.append(_with_band(dimension['s'], dimension['s_band']))
        line += (
            [_with_band(dimension['optimum'], dimension['optimum_band'])]
            if 'optimum' in dimension
            else []
        )
        line += [f'{grown[name]:.4g}'] if grown else []
        lines.append(line)
    print(align(lines, left=1))
    for kind, key in (('x*', 'examples'), ('scaled', 'scaled_examples')):
        if summary.get(key):
            print(f'{kind}: the budget {summary["target"]:.3g} is {summary[key]:.3g} examples')
    print(f'error of the fit: {summary["rmse"]:.2g} of log y')
    for note in summary['notes']:
        print(note)


def _with_band(value: float, band: Sequence[float]) -> str:
    return f'{value:.4g} [{band[0]:.4g}, {band[1]:.4g}]' if band else f'{value:.4g}'


def optimal(argv: Sequence[str]) -> int:
    """Fit the best model and data size for a compute budget: joint law, isoFLOPs, frontier."""
    args = _optimal_parser().parse_args(argv)
    from vit_jax.scaling import points, rows, table
    from vit_jax.scaling.optimal import AnalysisOptions, analyze, require_law

    check_fit_flags(args)
    require_positive(args.inference_tokens, '--inference-tokens')
    columns = points.Columns(args.n, args.d, args.c, args.y, parse_names(args.by), args.unique)
    factor = table.parse_holdout_factor(args.holdout) if args.holdout else 0.0
    options = AnalysisOptions(args.target, factor, args.bootstrap, args.inference_tokens)
    curves = points.read(rows.read_csv(args.csv), columns)
    analyses = [analyze(curve, options) for curve in curves if len(curve.y)]
    require_law(analyses)
    if not write_json(_optimal_summary(analyses, columns), args.json):
        _print_optimal(analyses, columns)
    if args.out:
        from vit_jax.scaling import plots_optimal

        print(save_figure(plots_optimal.draw_optima(analyses, columns), args.out, '--out'))
    return 0


def _optimal_parser() -> Parser:
    parser = Parser('scaling optimal', optimal.__doc__)
    add = parser.add_argument
    add('--csv', metavar='FILE', required=True, help='table with a header')
    add('--n', metavar='COL', help='column of the model size; two of --n, --d and --c suffice')
    add('--d', metavar='COL', help='column of the data size: tokens, or images times patches')
    add('--c', metavar='COL', help='column of training FLOPs (default: 6 N D)')
    add(
        '--y',
        metavar='COL',
        required=True,
        help='column of a loss; 1-COL for one minus an accuracy',
    )
    unique = 'column of unique data, in the unit of D (default: from examples_seen and data_size)'
    add('--unique', metavar='COL', help=unique)
    add('--by', metavar='COL,COL', default='', help='columns that distinguish the curves')
    add('--target', type=float, metavar='C', help='budget for which the optimum is predicted')
    served = 'data served, in the unit of D, to find the cheapest model of the same loss'
    add('--inference-tokens', type=float, metavar='T', help=served)
    add(
        '--holdout',
        metavar='4x',
        help='hold out budgets above this share of the largest; 4x for a quarter',
    )
    add_bootstrap_flag(parser)
    add_json_flag(parser, former_file=True)
    add('--out', metavar='FILE', help='picture of contours and parabolas: PNG, SVG or PDF')
    return parser


def _optimal_summary(analyses: Sequence[Analysis], columns: Columns) -> dict[str, Any]:
    from vit_jax.scaling import points

    return {
        'columns': {flag.strip('-'): column for column, flag in columns.flags()},
        'counted': points.describe_conventions(columns),
        'curves': [
            {
                'by': analysis.points.by,
                'points': len(analysis.points.y),
                'flops': analysis.points.cost.text,
                **analysis.summary,
                'shown': analysis.shown,
                'notes': list(analysis.notes),
                'left_out': list(analysis.points.left_out),
            }
            for analysis in analyses
        ],
    }


def _print_optimal(analyses: Sequence[Analysis], columns: Columns) -> None:
    from vit_jax.scaling import points
    from vit_jax.scaling.optimal import BIAS
    from vit_jax.scaling.rows import join_labels, label

    print('L = E + A N^-alpha + B D^-beta; N* ~ C^a, D* ~ C^b')
    print(points.describe_conventions(columns))
    lines = [['curve', 'way', 'a', 'b', 'held out', 'C', 'N*', 'D*', 'loss']]
    for analysis in analyses:
        lines += [
            [label(analysis.points.by), *_optimal_row(method, analysis)]
            for method in analysis.summary
        ]
    print(align(lines, left=2))
    for analysis in analyses:
        name = label(analysis.points.by)
        print(f'{name}: {analysis.points.cost.text}')
        if law := analysis.summary['joint']:
            params = [f'{k} = {_fitted_with_band(law, k)}' for k in LAW if law[k] is not None]
            print(
                f'{name}: ' + (', '.join(params) or 'no parameter of the joint law is identified')
            )
            if served := law.get('inference'):
                print(f'{name}: {_inference_line(served)}')
    notes = [
        (label(analysis.points.by), note)
        for analysis in analyses
        for note in (*analysis.notes, *analysis.points.left_out)
    ]
    for line in join_labels(notes):
        print(line)
    if any(analysis.summary['isoflop'] for analysis in analyses):
        print(f'isoflop: {BIAS}')


def _inference_line(served: dict[str, Any]) -> str:
    n, d = (_fitted_with_band(served, key) for key in 'ND')
    return (
        f'with inference on {served["served"]:.3g}, cheapest at the loss of the optimum of '
        f'{served["C"]:.3g} FLOPs: N {n}, D {d}, training {served["training"]:.3g}, in total '
        f'{served["total"]:.3g} FLOPs, {served["saved"]:.0%} less than the optimum of training'
    )


def _optimal_row(way: str, analysis: Analysis) -> list[str]:
    law = analysis.summary[way]
    if law is None:
        return [way, *['-'] * 7]
    target = law.get('target') or {}
    error = law.get('holdout_rmse')
    cells = [_fitted_with_band(law, name) for name in 'ab']
    predicted = [f'{target["C"]:.3g}' if target else '-']
    predicted += [
        _fitted_with_band(target, name) if name in target else '-' for name in ('N', 'D', 'loss')
    ]
    return [way, *cells, '-' if error is None else f'{error:.4f}', *predicted]


def _fitted_with_band(law: dict[str, Any], name: str) -> str:
    """Format a value and its interval; a dash if it is not identified."""
    return '-' if law[name] is None else _with_band(law[name], law['bands'].get(name, ()))


def add_bootstrap_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--bootstrap`."""
    parser.add_argument(
        '--bootstrap',
        type=int,
        default=100,
        metavar='N',
        help='bootstrap replicates of the bands (default: %(default)s)',
    )


def check_fit_flags(args: argparse.Namespace) -> None:
    """Raise UserError if `--target` or `--bootstrap` is out of range."""
    require_positive(args.target, '--target')
    require_count(args.bootstrap, '--bootstrap')


def require_positive(value: float | None, flag: str) -> None:
    """Raise UserError unless the value is positive and finite, or None."""
    if value is not None and not 0 < value < float('inf'):
        raise UserError(f'{flag} {value:g}: must be positive')


def require_count(value: int, flag: str) -> None:
    """Raise UserError for a negative number."""
    if value < 0:
        raise UserError(f'{flag} {value}: must be at least 0')


def parse_names(text: str) -> tuple[str, ...]:
    """Split 'a,b' into ('a', 'b')."""
    return tuple(name.strip() for name in text.split(',') if name.strip())
