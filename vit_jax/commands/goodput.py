"""Show how runs spent their time: steps that count, waiting, compiling, failures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import RUNS_HELP, Parser, add_json_flag, check_picture, save_figure
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.storage.times import Account

NO_RECORD = 'has no times.jsonl: it is older than the recording of times'


def main(argv: Sequence[str]) -> int:
    """Print a table with a column per run; draw it with `--out`.

    Raises:
      UserError: None of the runs has a record of its time.
    """
    parser = Parser('goodput', __doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help=RUNS_HELP,
    )
    parser.add_argument(
        '--out', metavar='FILE', help='picture of the shares over time: PNG, SVG or PDF'
    )
    add_json_flag(parser)
    args = parser.parse_args(argv)
    from vit_jax.storage import paths, run_folder, times
    from vit_jax.viz import charts, comparison

    if args.out is not None:
        check_picture(args.out, '--out')
    runs = [str(run) for folder in args.runs for run in run_folder.find_runs(paths.path(folder))]
    folders = list(dict.fromkeys(runs))
    records = [times.read(paths.path(folder)) for folder in folders]
    by_name = dict(zip(comparison.labels(folders), records, strict=True))
    accounts = {name: account for name, account in by_name.items() if account is not None}
    without = [name for name, account in by_name.items() if account is None]
    if not accounts:
        raise UserError(f'{", ".join(without)} {NO_RECORD}')
    if args.out is not None:
        save_figure(charts.draw_goodput(accounts), args.out, '--out')
    if args.json:
        print(json.dumps([row(name, account) for name, account in by_name.items()]))
        return 0
    print_table(accounts)
    for name in without:
        print(f'{name} {NO_RECORD}')
    return 0


def row(name: str, account: Account | None) -> dict[str, Any]:
    """Convert the time of a run to JSON: seconds of each part, and share of steps that count."""
    if account is None:
        return {'run': name, 'goodput': None}
    return {
        'run': name,
        'goodput': account.goodput,
        'starts': account.starts,
        'wall_sec': account.wall,
        'seconds': account.seconds,
    }


def make_table(accounts: Mapping[str, Account]) -> list[list[str]]:
    """Tabulate the time and share of each part, then the total and the number of starts."""
    from vit_jax.storage import times

    part_names = dict.fromkeys(
        name for name in times.MEANING for a in accounts.values() if name in a.seconds
    )
    rows = [
        [
            name,
            *(format_cell(a.seconds.get(name, 0.0), a.wall) for a in accounts.values()),
            times.MEANING[name],
        ]
        for name in part_names
    ]
    totals = [format_cell(a.wall, a.wall) for a in accounts.values()]
    starts = [str(a.starts) for a in accounts.values()]
    return [
        ['', *accounts, ''],
        *rows,
        ['all', *totals, 'from the first start to the end'],
        ['starts', *starts, 'of the process'],
    ]


def format_cell(seconds: float, wall: float) -> str:
    """Format a time and its share: 75 of 100 seconds -> '1:15  75.0 %'."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    clock = f'{hours}:{minutes:02}:{remainder:02}' if hours else f'{minutes}:{remainder:02}'
    return f'{clock} {seconds / wall if wall else 0:7.1%}'


def print_table(accounts: Mapping[str, Account]) -> None:
    """Print `make_table`."""
    from vit_jax.runtime.console import Console, Table

    head, *rows = make_table(accounts)
    aligned = Table(*head[:-1], left=1)
    aligned.add_column(head[-1])
    for cells in rows:
        aligned.add_row(*cells)
    Console(soft_wrap=True).print(aligned)
