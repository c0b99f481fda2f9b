"""Compare runs: cost, speed, results, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import Parser, add_json_flag, check_picture, save_figure
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.viz.comparison import History

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Print a table with a column per run; draw metrics with `--out`."""
    parser = Parser('compare', __doc__)
    parser.add_argument('workdirs', nargs='+', metavar='DIR', help='run folders')
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help="metric such as 'test/accuracy', or a pattern such as 'bleu/*' for the last values of "
        'all matching metrics; may be repeated (default: all evaluation metrics)',
    )
    parser.add_argument(
        '--reach',
        type=float,
        metavar='VALUE',
        help='value of the first metric, to show when runs reach it',
    )
    parser.add_argument(
        '--x', choices=('steps', 'minutes'), default='steps', help='x axis (default: steps)'
    )
    parser.add_argument('--out', metavar='FILE', help='picture of the metrics: PNG, SVG or PDF')
    add_json_flag(parser)
    args = parser.parse_args(argv)
    from vit_jax.viz import comparison

    if args.out is not None:
        check_picture(args.out, '--out')
    histories = comparison.read(args.workdirs)
    metrics = args.metric or comparison.evaluation_metrics(histories)
    names = [name for metric in metrics for name in comparison.find_metrics(histories, metric)]
    rows = [row(folder, c, names) for folder, c in zip(args.workdirs, histories, strict=True)]
    if args.reach is not None:
        falls = comparison.smaller_is_better(histories, names[0])
        for record, history in zip(rows, histories, strict=True):
            record |= measure_time_to(history, names[0], args.reach, falls)
    if args.out is not None:
        save_figure(comparison.draw(histories, metrics, args.x), args.out, '--out')
    print(json.dumps(rows)) if args.json else print_table(rows)
    return 0


def row(folder: str, history: History, metrics: Sequence[str]) -> Row:
    """Collect the cost and speed of a run, and the last value of each metric.

    Goodput is the share of time spent on steps that count; None for runs without a record of time.
    """
    import numpy as np

    from vit_jax.storage import paths, run_folder, times

    rate = {f'{unit}/s': value for unit, value in [history.rate() or ('images', None)]}
    return {
        'run': history.name,
        'parameters': run_folder.count_parameters(paths.path(folder)),
        'steps': history.steps,
        'minutes': history.minutes(np.array([history.steps])).item(),
        'goodput': account.goodput if (account := times.read(paths.path(folder))) else None,
        **rate,
        **{metric: history.last(metric) for metric in metrics},
    }


def measure_time_to(history: History, metric: str, value: float, falls: bool) -> Row:
    """Find the step and the minutes of training at which a metric reached a value.

    Raises:
      UserError: The run does not have the metric.
    """
    import numpy as np

    if metric not in history.series:
        raise UserError(f'{history.name} does not have the metric {metric!r} of --reach {value:g}')
    step = history.first_step_at(metric, value, falls)
    minutes = None if step is None else history.minutes(np.array([step])).item()
    return {f'steps to {value:g}': step, f'minutes to {value:g}': minutes}


def print_table(rows: Sequence[Row]) -> None:
    """Print a table with a column for each run."""
    from vit_jax.runtime.console import Console, Table

    table = Table('', *(record['run'] for record in rows), left=1)
    for name in dict.fromkeys(key for record in rows for key in record if key != 'run'):
        table.add_row(name, *[format_value(name, record.get(name)) for record in rows])
    Console(soft_wrap=True).print(table)


def format_value(name: str, value: float | None) -> str:
    """Format a number of the table."""
    if value is None:
        return '-'
    if isinstance(value, int) or name.endswith('/s'):
        return f'{value:,.0f}'
    if name.startswith('minutes'):
        return f'{value:.1f}'
    return f'{value:.3g}' if 0 < abs(value) < 0.01 else f'{value:.4f}'
