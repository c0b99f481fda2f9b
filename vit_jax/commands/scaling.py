"""Scaling curves: plan runs, collect them into a table, fit and plot laws, or report it all."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import (
    PICTURE_HELP,
    RUNS_HELP,
    Parser,
    add_allow_flag,
    add_json_flag,
    align,
    check_output,
    check_picture,
    program,
    save_figure,
    write_file,
    write_json,
)
from vit_jax.commands._scaling_curve import predict_run
from vit_jax.commands._scaling_laws import (
    add_bootstrap_flag,
    optimal,
    parse_names,
    require_count,
    require_positive,
    shape,
    study,
)
from vit_jax.commands._scaling_plan import plan
from vit_jax.commands._scaling_tuned import tuned
from vit_jax.config.load import parse_config_args
from vit_jax.errors import UserError, nearest, positive_number
from vit_jax.runtime import environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vit_jax.scaling.pages import Block
    from vit_jax.scaling.table import Curve, FitOptions

FORMS = 'auto (weighted by an inner holdout), power, irreducible, shifted, m2, m4, joint'


def main(argv: Sequence[str]) -> int:
    """Run a subcommand.

    Raises:
      UserError: The subcommand is unknown.
    """
    if not argv or argv[0] in ('-h', '--help'):
        print(usage())
        return 0
    name, *flags = argv
    if name not in ACTIONS:
        raise UserError(nearest('subcommand', name, ACTIONS))
    return ACTIONS[name](flags)


def usage() -> str:
    """List the subcommands."""
    lines = [f'  {name:<13}{act.__doc__}' for name, act in ACTIONS.items()]
    return '\n'.join([f'usage: {program()} scaling SUBCOMMAND [--help | flags]', '', *lines])


def collect(argv: Sequence[str]) -> int:
    """Write one CSV row per run: parameters, examples seen, FLOPs, chip-hours, metrics."""
    parser = Parser('scaling collect', collect.__doc__)
    parser.add_argument('folders', nargs='+', metavar='DIR', help=RUNS_HELP)
    add_allow_flag(parser)
    parser.add_argument('--out', metavar='FILE', help='file to write')
    args = parser.parse_args(argv)
    if args.out is not None:
        check_output(args.out, '--out')
    from vit_jax.profiling.cost import train_flops
    from vit_jax.scaling import runs

    rows = runs.collect(args.folders, partial(train_flops, allowed=args.allow))
    _, left_out = runs.find_runs(args.folders)
    if args.out is None:
        print(runs.to_csv(rows), end='')
    else:
        write_file(args.out, runs.to_csv(rows), '--out')
        for line in left_out:
            print(f'left out: {line}')
        print(f'{args.out}: {len(rows)} runs')
    return 0


def fit(argv: Sequence[str]) -> int:
    """Fit a curve to each group of a table, and measure its extrapolation."""
    parser = Parser('scaling fit', fit.__doc__)
    add_table_flags(parser)
    add_json_flag(parser, former_file=True)
    args = parser.parse_args(argv)
    from vit_jax.scaling import rows, table
    from vit_jax.scaling.report import summarize

    options = read_options(args)
    points = rows.read_csv(args.csv)
    table.require_growth(points, options)
    cores = environment.available_cores()
    curves = table.fit_curves(points, options, cores)
    table.require_fit(curves)
    summary = summarize(curves, options, cores)
    if not write_json(summary, args.json):
        print_table(curves, options, summary)
    return 0


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for reading a table."""
    parser.add_argument('--csv', metavar='FILE', required=True, help='a table with a header')
    add_fit_flags(parser)


def add_fit_flags(
    parser: argparse.ArgumentParser, x: str | None = None, y: str | None = None
) -> None:
    """Add the flags of a fit; x and y are required if they have no default."""
    add = parser.add_argument
    default = ' (default: %(default)s)'
    shown_default = '' if x is None else default
    scale = f'column of examples, FLOPs or another scale; N,D for the form joint{shown_default}'
    add('--x', metavar='COL', required=x is None, default=x, help=scale)
    error = f'column of an error or a loss; 1-COL for one minus an accuracy{shown_default}'
    add('--y', metavar='COL', required=y is None, default=y, help=error)
    add('--by', metavar='COL,COL', default='', help='columns that distinguish the curves')
    add('--seed-column', metavar='COL', help='column of seeds; rows with equal x become one point')
    add('--seed', dest='seed_column', default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    holdout = parser.add_mutually_exclusive_group()
    holdout.add_argument(
        '--holdout-column',
        metavar='COL',
        help='column with 1 for rows to fit, 0 for rows to hold out',
    )
    holdout.add_argument(
        '--holdout',
        default='0.5',
        metavar='SHARE',
        help=f'hold out x above this share of the largest; 4x for a quarter{default}',
    )
    add('--form', default='auto', help=f'form of the law: {FORMS}{default}')
    add('--against', metavar='FORM,FORM', default='', help='forms to compare with, or all')
    add('--frontier', action='store_true', help='fit to the Pareto frontier only')
    add('--target', type=float, metavar='X', help='x at which y is predicted, with an interval')
    add_bootstrap_flag(parser)


def read_options(args: argparse.Namespace) -> FitOptions:
    """Read the options of a fit from the flags.

    Raises:
      UserError: A number is out of range, or a form is unknown.
    """
    from vit_jax.scaling import averaging, forms, table
    from vit_jax.scaling.table import FitOptions

    require_count(args.bootstrap, '--bootstrap')
    require_positive(args.target, '--target')
    against = parse_names(args.against)
    share = table.parse_holdout_share(args.holdout)
    if args.form != averaging.AUTO:
        forms.find_form(args.form)
    table.find_variants(against, args.form, len(parse_names(args.x)))
    return FitOptions(
        x=parse_names(args.x),
        y=args.y,
        by=parse_names(args.by),
        holdout_column=args.holdout_column,
        holdout=share,
        form=args.form,
        against=against,
        frontier=args.frontier,
        bootstrap=args.bootstrap,
        seed=args.seed_column,
        target=args.target,
    )


def print_table(curves: Sequence[Curve], options: FitOptions, summary: Mapping[str, Any]) -> None:
    """Print a row for each curve of a summary, then warnings and medians."""
    from vit_jax.scaling.report import describe_forms, with_band

    fitted = [result for result in summary['curves'] if result['params']]
    columns = list(dict.fromkeys(name for result in fitted for name in result['params']))
    lines = [[*options.by, 'points', *columns, 'held out', *summary['against']]]
    for curve, result in zip(curves, summary['curves'], strict=True):
        params = [with_band(result, name) if result['params'] else '-' for name in columns]
        values = [curve.holdout_rmse, *curve.against.values()]
        cells = ['-' if value is None else f'{value:.4g}' for value in values]
        lines.append([*curve.by.values(), str(len(curve.y)), *params, *cells])
    print(f'{options.form}: {describe_forms(summary)}'.replace('`', ''))
    print(align(lines, left=len(options.by)))
    if any(result['n_holdout'] for result in fitted):
        print('parameters: law of all points; held out: error of a fit without the largest points')
    print_notes(curves, options)
    print_medians(summary)


def print_notes(curves: Sequence[Curve], options: FitOptions) -> None:
    """Print the predictions at the target, and the notes and warnings of each curve."""
    from vit_jax.scaling import averaging
    from vit_jax.scaling.rows import join_labels
    from vit_jax.scaling.table import predict_at

    lines: list[tuple[str, str]] = []
    for curve in curves:
        if options.target is not None:
            prediction, reason = predict_at(curve, options.target)
            prediction_line = (
                _format_prediction(prediction) if prediction else f'no prediction: {reason}'
            )
            target = f'{options.y} at {options.x[0]} = {options.target:g}: {prediction_line}'
            lines.append((curve.label, target))
        if curve.seeds.several:
            lines.append((curve.label, curve.seeds.text))
        lines += [(curve.label, note) for note in curve.notes]
        if isinstance(curve.fit, averaging.MeanFit):
            lines.append((curve.label, curve.fit.chosen))
        warnings = curve.fit.warnings if curve.fit else (curve.problem,)
        lines += [(curve.label, warning) for warning in warnings]
    for line in join_labels(lines):
        print(line)


def _format_prediction(prediction: dict[str, Any]) -> str:
    note = f'; {prediction["note"]}' if prediction['note'] else ''
    if prediction['band'] is None:
        return f'{prediction["y"]:.4g}, without an interval{note}'
    low, high = prediction['band']
    return f'{prediction["y"]:.4g} [{low:.4g}, {high:.4g}]{note}'


def print_medians(summary: Mapping[str, Any]) -> None:
    """Print the curves' median extrapolation error, and the comparison with other forms."""
    if summary['median_holdout_rmse'] is not None:
        print(f'median RMSE of log error, held out: {summary["median_holdout_rmse"]:.4f}')
    coverage = summary['bands_hold_last']
    if coverage['of']:
        print(
            '90 % bands of the fits without the held-out points contain the last of these in '
            f'{coverage["held"]} of {coverage["of"]} curves'
        )
    for name, other in summary['against'].items():
        if other['of']:
            share = other['better_on'] / other['of']
            print(
                f'{name}: {other["median_holdout_rmse"]:.4f}; {summary["form"]} is better on '
                f'{other["better_on"]} of {other["of"]} curves ({share:.0%})'
            )


def plot(argv: Sequence[str]) -> int:
    """Draw the points of a table and the curves fitted to them."""
    parser = Parser('scaling plot', plot.__doc__)
    add_table_flags(parser)
    parser.add_argument('--out', metavar='FILE', default='scaling.png', help=PICTURE_HELP)
    overlay = 'table of published points, with the same columns, and one named curve'
    parser.add_argument('--overlay', metavar='FILE', help=overlay)
    args = parser.parse_args(argv)
    from vit_jax.scaling import plots, rows, table

    check_picture(args.out, '--out')
    options = read_options(args)
    curves = table.fit_curves(rows.read_csv(args.csv), options, environment.available_cores())
    published = []
    if args.overlay:
        published = table.published_curves(rows.read_csv(args.overlay, '--overlay'), options)
    figure = plots.draw_curves(curves, options, published)
    print(save_figure(figure, args.out, '--out'))
    print_notes(curves, options)
    return 0


def report(argv: Sequence[str]) -> int:
    """Collect, fit, plot: runs.csv, and scaling.html (self-contained), .md, .json, .png, .svg."""
    parser = Parser('scaling report', report.__doc__)
    parser.add_argument('folders', nargs='+', metavar='DIR', help=RUNS_HELP)
    add_allow_flag(parser)
    parser.add_argument(
        '--out', metavar='DIR', default='scaling', help='folder of the report (default: scaling)'
    )
    parser.add_argument('--unfinished', action='store_true', help='include unfinished runs')
    add_fit_flags(parser, x='examples_seen', y='1-test/accuracy')
    args = parser.parse_args(argv)
    from vit_jax.profiling.cost import train_flops
    from vit_jax.scaling import (
        checklist,
        manifest,
        plots,
        plots_optimal,
        report_optimal,
        runs,
        table,
    )
    from vit_jax.scaling.report import HOLDOUT_SHARES, report_blocks, summarize
    from vit_jax.scaling.rows import is_unfinished, read_csv

    options = dataclasses.replace(read_options(args), beside=HOLDOUT_SHARES)
    rows = runs.collect(args.folders, partial(train_flops, allowed=args.allow))
    folder = pathlib.Path(args.out)
    write_file(folder / 'runs.csv', runs.to_csv(rows), '--out')
    read = read_csv(folder / 'runs.csv')
    selected = [row for row in read if args.unfinished or not is_unfinished(row)]
    if not selected:
        raise UserError(f'none of the {len(rows)} runs is finished; --unfinished includes them')
    alike, not_classified = runs.select_classification(selected, options.by)
    fitted, skipped = table.select_usable(alike, options)
    skipped = not_classified + skipped + runs.find_runs(args.folders)[1]
    if not fitted:
        raise UserError(f'none of the {len(selected)} runs can be fitted; {skipped[0]}')
    table.require_growth(fitted, options)
    cores = environment.available_cores()
    curves = table.fit_curves(fitted, options, cores)
    summary = summarize(curves, options, cores)
    used = {row['run'] for row in fitted}
    entries = manifest.entries([row for row in rows if row['run'] in used])
    going_on = [
        str(row['run']) for row in rows if row['run'] not in {row['run'] for row in selected}
    ]
    stored = {'manifest': entries, 'left_out': skipped, 'versions': manifest.versions()}
    pictures = {'scaling': plots.draw_curves(curves, options)}
    law: list[Block] = []
    if study := report_optimal.find_study(fitted, options.y, options.bootstrap):
        pictures['optimal'] = plots_optimal.draw_optima([study[0]], study[1], details=True)
        law = report_optimal.optimal_blocks(*study)
        stored['optimal'] = {**study[0].summary, 'shown': study[0].shown}
    questions = checklist.tabulate(
        entries, curves, options, study[0].joint if study else None, len(skipped) + len(going_on)
    )
    stored['checklist'] = dict(questions[1:])
    blocks = report_blocks(summary, entries, skipped, going_on, law, questions)
    _write_report(folder, summary | stored, pictures, blocks)
    print_table(curves, options, summary)
    for line in skipped:
        print(f'left out: {line}')
    print(f'{len(fitted)} of {len(rows)} runs; {folder}/scaling.html has the report')
    return 0


def _write_report(
    folder: pathlib.Path,
    summary: dict[str, Any],
    drawings: Mapping[str, Figure],
    blocks: Sequence[Block],
) -> None:
    """Write the summary, the pictures and the page in their formats."""
    from vit_jax.scaling import pages
    from vit_jax.viz import figures

    text = json.dumps(summary, indent=2, allow_nan=False) + '\n'
    write_file(folder / 'scaling.json', text, '--out')
    for name, figure in drawings.items():
        for suffix in ('png', 'svg'):
            figures.save(figure, folder / f'{name}.{suffix}')
    pictures = {f'{name}.png': (folder / f'{name}.png').read_bytes() for name in drawings}
    write_file(folder / 'scaling.md', pages.markdown(blocks), '--out')
    write_file(folder / 'scaling.html', pages.html_page(blocks, pictures), '--out')


def coverage(argv: Sequence[str]) -> int:
    """Measure the coverage of a fit's bands on random laws with known noise."""
    parser = Parser('scaling coverage', coverage.__doc__)
    from vit_jax.scaling.coverage import FORMS, Simulation, measure

    default = Simulation()
    default_note = ' (default: %(default)s)'
    add = parser.add_argument
    add('--form', default=default.form, help=f'form of the laws: {", ".join(FORMS)}{default_note}')
    add(
        '--points',
        type=int,
        default=default.points,
        metavar='N',
        help=f'points per curve{default_note}',
    )
    add(
        '--noise',
        type=float,
        default=default.noise,
        help=f'standard deviation of log y{default_note}',
    )
    add(
        '--curves',
        type=int,
        default=default.curves,
        metavar='N',
        help=f'number of random laws{default_note}',
    )
    add(
        '--bootstrap',
        type=int,
        default=default.bootstrap,
        metavar='N',
        help=f'bootstrap replicates{default_note}',
    )
    add('--seed', type=int, default=0, help=f'random seed of the laws{default_note}')
    add_json_flag(parser)
    args = parser.parse_args(argv)
    setting = Simulation(args.form, args.points, args.noise, args.curves, args.bootstrap)
    shares = measure(setting, args.seed)
    if args.json:
        print(json.dumps(shares))
        return 0
    description = (
        f'{args.curves} laws of the form {args.form}, {args.points} points, noise {args.noise:g}'
    )
    if args.form == 'auto':
        description = f'{args.curves} laws of each kind, {args.points} points or more each'
    print(f'{description}: share of true values in the 90 % bands')
    print(align([[name, f'{share:.2f}'] for name, share in shares.items()], left=1))
    return 0


def coordinates(argv: Sequence[str]) -> int:
    """Check that a few steps change wide and narrow models alike (muP)."""
    parser = Parser('scaling coordinates', coordinates.__doc__)
    add = parser.add_argument
    widths = "multiples of the base model's widths (default: %(default)s)"
    add('--multiples', default='1,2,4,8', metavar='N,N', help=widths)
    steps_help = 'number of steps, at a constant learning rate (default: 5)'
    add('--steps', type=positive_number, default=5, metavar='N', help=steps_help)
    add(
        '--seeds',
        type=positive_number,
        default=1,
        metavar='N',
        help='number of seeds to average over (default: 1)',
    )
    add('--out', metavar='FILE', default='coordinates.png', help=PICTURE_HELP)
    args, config = parse_config_args(parser, argv)
    multiples = _parse_multiples(args.multiples)
    if config is None:
        raise UserError('scaling coordinates needs a config: scaling coordinates CONFIG')
    from vit_jax.rehearsal.coordinates import check_coordinates
    from vit_jax.runtime.console import progress
    from vit_jax.viz import charts

    check_picture(args.out, '--out')
    with progress('trainings', 2 * len(multiples) * args.seeds) as advance:
        changes = check_coordinates(config, multiples, args.steps, args.seeds, advance)
    print(f'RMS of the change of each layer by {args.steps} steps')
    print(align(_coordinate_table(changes, multiples), left=2))
    print(save_figure(charts.draw_coordinates(changes, args.steps), args.out, '--out'))
    return 0


def _parse_multiples(text: str) -> list[int]:
    numbers = [number.strip() for number in text.split(',')]
    if not all(number.isdecimal() and int(number) for number in numbers) or len(set(numbers)) < 2:
        raise UserError(f'--multiples {text!r}: give two or more whole numbers, such as 1,2,4,8')
    return sorted({int(number) for number in numbers})


def _coordinate_table(changes: Sequence, multiples: Sequence[int]) -> list[list[str]]:
    """Tabulate each layer of each parametrization; growth is from the first width to the last."""
    lines = [['parametrization', 'layer', *(f'{times}x' for times in multiples), 'growth']]
    for name, layer in dict.fromkeys((c.parametrization, c.layer) for c in changes):
        rms = [c.rms for c in changes if (c.parametrization, c.layer) == (name, layer)]
        lines.append([name, layer, *(f'{x:.3g}' for x in rms), f'{rms[-1] / rms[0]:.2f}'])
    return lines


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    'plan': plan,
    'study': study,
    'collect': collect,
    'fit': fit,
    'plot': plot,
    'optimal': optimal,
    'shape': shape,
    'tuned': tuned,
    'curve': predict_run,
    'report': report,
    'coverage': coverage,
    'coordinates': coordinates,
}
