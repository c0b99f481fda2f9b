"""Scaling curves: plan runs, collect them into a table, fit, plot, or report it all."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _results
from vit_jax.commands._coordinates import coordinates
from vit_jax.commands._coverage import coverage
from vit_jax.commands._optimal import optimal
from vit_jax.commands._parser import Parser, add_allow_flag, align, check_output
from vit_jax.commands._pictures import check_picture, save_figure
from vit_jax.commands._plan import plan
from vit_jax.commands._results import names, write
from vit_jax.commands._shape import shape
from vit_jax.commands._study import study
from vit_jax.errors import UserError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vit_jax.scaling.page import Block
    from vit_jax.scaling.table import Curve, FitOptions


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand."""
    if not argv or argv[0] in ('-h', '--help'):
        print(usage())
        return 0
    name, *rest = argv
    if name not in ACTIONS:
        raise UserError(nearest('subcommand', name, ACTIONS))
    return ACTIONS[name](rest)


def usage() -> str:
    """The list of subcommands."""
    lines = [f'  {name:<13}{act.__doc__}' for name, act in ACTIONS.items()]
    return '\n'.join(['usage: vit_jax scaling SUBCOMMAND [--help | flags]', '', *lines])


def collect(argv: Sequence[str]) -> int:
    """Write one CSV row a run: parameters, examples seen, FLOPs, chip-hours, metrics."""
    parser = Parser('scaling collect', collect.__doc__)
    parser.add_argument('folders', nargs='+', metavar='DIR', help='run folders, or folders of them')
    add_allow_flag(parser)
    parser.add_argument('--output', metavar='FILE', help='write here instead of printing')
    args = parser.parse_args(argv)
    if args.output is not None:
        check_output(args.output, '--output')
    from vit_jax.profiling.cost import train_flops
    from vit_jax.scaling import runs

    rows = runs.collect(args.folders, partial(train_flops, allowed=args.allow))
    _, left_out = runs.find(args.folders)
    if args.output is None:
        print(runs.to_csv(rows), end='')
    else:
        write(args.output, runs.to_csv(rows), '--output')
        for line in left_out:
            print(f'left out: {line}')
        print(f'{args.output}: {len(rows)} runs')
    return 0


def fit(argv: Sequence[str]) -> int:
    """Fit one curve a group of a table, and measure how well it extrapolates."""
    parser = Parser('scaling fit', fit.__doc__)
    add_table_flags(parser)
    _results.add_json_flag(parser)
    args = parser.parse_args(argv)
    from vit_jax.scaling import rows, table
    from vit_jax.scaling.summary import summarize

    options = read_options(args)
    points = rows.read_csv(args.csv)
    table.require_growth(points, options)
    curves = table.fit_curves(points, options)
    table.require_fit(curves)
    summary = summarize(curves, options)
    _results.show(summary, args.json, lambda: print_table(curves, options))
    return 0


def plot(argv: Sequence[str]) -> int:
    """Draw the points of a table and the curves fitted to them."""
    parser = Parser('scaling plot', plot.__doc__)
    add_table_flags(parser)
    parser.add_argument('--output', metavar='FILE', default='scaling.png', help='PNG, SVG or PDF')
    parser.add_argument(
        '--target', type=float, metavar='X', help='mark what the laws predict there'
    )
    args = parser.parse_args(argv)
    from vit_jax.scaling import plots, rows, table

    check_picture(args.output, '--output')
    options = read_options(args)
    _results.require_positive(args.target, '--target')
    curves = table.fit_curves(rows.read_csv(args.csv), options)
    figure = plots.draw(curves, options, args.target)
    print(save_figure(figure, args.output, '--output'))
    return 0


def report(argv: Sequence[str]) -> int:
    """Collect, fit, plot: runs.csv, and scaling as .html (all in one), .md, .json, .png, .svg."""
    parser = Parser('scaling report', report.__doc__)
    parser.add_argument('folders', nargs='+', metavar='DIR', help='run folders, or folders of them')
    add_allow_flag(parser)
    parser.add_argument('--output', metavar='DIR', default='scaling', help='where the files go')
    parser.add_argument('--unfinished', action='store_true', help='take runs that go on, too')
    add_fit_flags(parser, x='examples_seen', y='1-test/accuracy')
    args = parser.parse_args(argv)
    from vit_jax.profiling.cost import train_flops
    from vit_jax.scaling import manifest, plots, runs, table
    from vit_jax.scaling import report as report_lib
    from vit_jax.scaling.rows import read_csv, unfinished
    from vit_jax.scaling.summary import summarize

    options = dataclasses.replace(read_options(args), beside=report_lib.BESIDE)
    rows = runs.collect(args.folders, partial(train_flops, allowed=args.allow))
    folder = pathlib.Path(args.output)
    write(folder / 'runs.csv', runs.to_csv(rows), '--output')
    read = read_csv(folder / 'runs.csv')
    taken = [row for row in read if args.unfinished or not unfinished(row)]
    if not taken:
        raise UserError(f'none of the {len(rows)} runs is finished; --unfinished takes them all')
    alike, others = runs.classifiers(taken, options.by)
    fitted, skipped = table.usable(alike, options)
    skipped = others + skipped + runs.find(args.folders)[1]
    if not fitted:
        raise UserError(f'none of the {len(taken)} runs can be fitted; {skipped[0]}')
    table.require_growth(fitted, options)
    curves = table.fit_curves(fitted, options)
    summary = summarize(curves, options)
    used = {row['run'] for row in fitted}
    entries = manifest.entries([row for row in rows if row['run'] in used])
    going_on = [str(row['run']) for row in rows if row['run'] not in {row['run'] for row in taken}]
    _write_report(
        folder,
        summary | {'manifest': entries, 'left_out': skipped, 'versions': manifest.versions()},
        plots.draw(curves, options),
        report_lib.blocks(summary, entries, skipped, going_on),
    )
    print_table(curves, options)
    for line in skipped:
        print(f'left out: {line}')
    print(f'{len(fitted)} of {len(rows)} runs; {folder}/scaling.html has the report')
    return 0


def _write_report(
    folder: pathlib.Path, summary: dict[str, Any], figure: Figure, blocks: Sequence[Block]
) -> None:
    """Write the summary, the picture and the page in their formats."""
    from vit_jax.scaling import page, report
    from vit_jax.viz import figures

    text = json.dumps(summary, indent=2, allow_nan=False) + '\n'
    write(folder / 'scaling.json', text, '--output')
    for suffix in ('png', 'svg'):
        figures.save(figure, folder / f'scaling.{suffix}')
    pictures = {report.PICTURE: (folder / report.PICTURE).read_bytes()}
    write(folder / 'scaling.md', page.markdown(blocks), '--output')
    write(folder / 'scaling.html', page.one_file(blocks, pictures), '--output')


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    'plan': plan,
    'study': study,
    'collect': collect,
    'fit': fit,
    'plot': plot,
    'optimal': optimal,
    'shape': shape,
    'report': report,
    'coverage': coverage,
    'coordinates': coordinates,
}


_FORMS = 'auto (weighted by an inner hold-out), power, irreducible, shifted, m2, m4, joint'


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
    shown = '' if x is None else default
    add(
        '--x',
        metavar='COL',
        required=x is None,
        default=x,
        help=f'what grows: examples, FLOPs; two columns N,D for the form joint{shown}',
    )
    add(
        '--y',
        metavar='COL',
        required=y is None,
        default=y,
        help=f'an error or a loss; 1-COL for one minus an accuracy{shown}',
    )
    add('--by', metavar='COL,COL', default='', help='columns that distinguish the curves')
    add('--seed', metavar='COL', help='rows with equal x are one point: COL has their seeds')
    held = parser.add_mutually_exclusive_group()
    held.add_argument('--holdout-column', metavar='COL', help='1: fit on the row, 0: held out')
    held.add_argument(
        '--holdout',
        default='0.5',
        metavar='SHARE',
        help=f'hold out x above this share below the largest, or 4x: above a quarter{default}',
    )
    add('--form', default='auto', help=f'{_FORMS}{default}')
    add('--against', metavar='FORM,FORM', default='', help='compare with them, or with all')
    add('--frontier', action='store_true', help='fit to the Pareto frontier only')
    _results.add_bootstrap_flag(parser)


def read_options(args: argparse.Namespace) -> FitOptions:
    """The options of a fit from the flags.

    Raises:
      UserError: for a number out of range, or an unknown form.
    """
    from vit_jax.scaling import choice, forms, holdout, variants
    from vit_jax.scaling.table import FitOptions

    _results.require_count(args.bootstrap, '--bootstrap')
    against = names(args.against)
    share = holdout.share(args.holdout)
    if args.form != choice.AUTO:
        forms.find(args.form)
    variants.find(against, args.form, len(names(args.x)))
    return FitOptions(
        x=names(args.x),
        y=args.y,
        by=names(args.by),
        holdout_column=args.holdout_column,
        holdout=share,
        form=args.form,
        against=against,
        frontier=args.frontier,
        bootstrap=args.bootstrap,
        seed=args.seed,
    )


def print_table(curves: Sequence[Curve], options: FitOptions) -> None:
    """Print a line for each curve with its warnings below, and the medians."""
    from vit_jax.scaling import choice
    from vit_jax.scaling.summary import summarize

    found = [curve.fit for curve in curves if curve.fit]
    columns = list(dict.fromkeys(name for one in found for name in one.params))
    summary = summarize(curves, options)
    lines = [[*options.by, 'points', *columns, 'held out', *summary['against']]]
    for curve in curves:
        params = curve.fit.params if curve.fit else {}
        values = [*(params.get(n) for n in columns), curve.holdout_rmse, *curve.against.values()]
        cells = ['-' if value is None else f'{value:.4g}' for value in values]
        lines.append([*curve.by.values(), str(int(curve.kept.sum())), *cells])
    print(f'{options.form}: {summary["formula"]}')
    print(align(lines, left=len(options.by)))
    for curve in curves:
        if curve.seeds.several:
            print(f'{curve.label}: {curve.seeds.words}')
        for note in curve.notes:
            print(f'{curve.label}: {note}')
        if isinstance(curve.fit, choice.MeanFit):
            print(f'{curve.label}: {curve.fit.chosen}')
        for warning in curve.fit.warnings if curve.fit else (curve.problem,):
            print(f'{curve.label}: {warning}')
    print_medians(summary)


def print_medians(summary: dict[str, Any]) -> None:
    """Print the curves' median extrapolation error, and the comparison with other forms."""
    if summary['median_holdout_rmse'] is not None:
        print(f'median RMSE of log error, held out: {summary["median_holdout_rmse"]:.4f}')
    for name, other in summary['against'].items():
        if other['of']:
            share = other['better_on'] / other['of']
            print(
                f'{name}: {other["median_holdout_rmse"]:.4f}; {summary["form"]} is better on '
                f'{other["better_on"]} of {other["of"]} curves ({share:.0%})'
            )
