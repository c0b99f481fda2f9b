"""Try a run in minutes before it waits in a queue: its data, folder, steps and resumption."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.commands import sweep, train
from vit_jax.commands._parser import Parser, add_allow_flag, add_json_flag
from vit_jax.config.load import parse_config_args, split_overrides
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.runtime.console import Console, status


def main(argv: Sequence[str]) -> int:
    """Print each check, or JSON; return 1 if one fails."""
    return EXIT_FAILED if print_rehearsal(argv) else 0


def print_rehearsal(argv: Sequence[str]) -> list[Any]:
    """Print each check, or JSON, and return the rows that failed.

    Raises:
      UserError: A flag is out of range, excluded by another, or needs another.
    """
    parser = make_parser()
    args, config = parse_config_args(parser, argv)
    if (config is None) == (args.sweep is None):
        raise UserError('rehearse needs one of CONFIG and --sweep FILE[:ARG]')
    if args.minutes <= 0:
        raise UserError(f'--minutes {args.minutes:g}: must be positive')
    if args.price is not None and args.topology is None:
        raise UserError('--price applies to the chip-hours of --topology: give both')
    rows = []
    for name, choice in choose_configs(config, args.sweep):
        for row in rehearse_config(choice, args):
            rows.append(row._replace(name=f'{name} {row.name}'.strip()))
            if not args.json:
                print_row(rows[-1])
    if args.topology:
        rows.append(preflight(argv, args))
        if not args.json:
            print_row(rows[-1])
    if args.json:
        print(json.dumps([row._asdict() for row in rows]))
    return [row for row in rows if row.result == 'failed']


def make_parser() -> Parser:
    """Make the parser of the flags that do not belong to the config."""
    parser = Parser('rehearse', __doc__)
    add = parser.add_argument
    add(
        '--workdir', required=True, type=train.run_folder_name, help='run folder of the planned run'
    )
    add('--sweep', metavar='FILE[:ARG]', help='sweep file whose first and last runs are tried')
    add(
        '--topology',
        metavar='SLICE',
        help='TPU slice, such as v5e:4x4, for which preflight is run, too',
    )
    add(
        '--price',
        type=float,
        metavar='X',
        help='price of a chip-hour of --topology, in any currency',
    )
    add(
        '--minutes',
        type=float,
        default=30.0,
        metavar='M',
        help='minutes that the first checkpoint, and the resumption, may take (default: 30)',
    )
    add_json_flag(parser)
    add_allow_flag(parser)
    return parser


def choose_configs(
    config: ConfigDict | None, sweep: str | None
) -> Iterator[tuple[str, ConfigDict]]:
    """Yield the config with an empty name, or the first and the last of a sweep with their points.

    Raises:
      UserError: The config of a point has a mistake.
    """
    if config is not None:
        yield '', config
        return
    from vit_jax.sweeps import space

    assert sweep is not None
    points = space.load_sweep(sweep, 'rehearse')
    configs = {_point_text(point): space.config_of(points, point) for point in points.queue()}
    choices = list(configs.items())
    yield from choices[:1] + choices[1:][-1:]


def _point_text(point: Any) -> str:
    return ', '.join(f'{key}={value}' for key, value in point.items())


def rehearse_config(config: ConfigDict, args: Any) -> Iterator[Any]:
    """Yield the rows of a rehearsal; a spinner turns while each is computed."""
    from vit_jax.rehearsal.rehearsal import rehearse

    rows = rehearse(config, args.workdir, args.allow, args.minutes)
    while True:
        with status('rehearsing'):
            row = next(rows, None)
        if row is None:
            return
        yield row


def preflight(argv: Sequence[str], args: Any) -> Any:
    """Run `preflight`, print its output, and return its row."""
    from vit_jax.rehearsal import kill_and_resume

    flags = preflight_flags(argv, args)
    command = [sys.executable, '-m', 'vit_jax', 'preflight', *flags]
    with status(f'compiling for {args.topology}'):
        row, output = kill_and_resume.run_command('preflight', command)
    if not args.json:
        print(output, end='')
    return row


def preflight_flags(argv: Sequence[str], args: Any) -> list[str]:
    """Collect the flags that `preflight` shares, and the config with its overrides."""
    shared = {name: getattr(args, name) for name in ('sweep', 'topology', 'price')}
    flags = [word for name, value in shared.items() if value for word in (f'--{name}', str(value))]
    return [*_config_flags(args.config, argv), *flags]


def _config_flags(config: str | None, argv: Sequence[str]) -> list[str]:
    """Convert the config and its overrides to flags."""
    overrides = [f'--config.{text}' for text in split_overrides(argv)[0]]
    return overrides if config is None else ['--config', config, *overrides]


def rehearsal_flags(command: Sequence[str]) -> list[str]:
    """Convert a command of `launch` to the flags of `rehearse`.

    Raises:
      UserError: The command is neither `train` nor `sweep create`.
    """
    if command[0] == 'train':
        args, _ = train.parse(command[1:])
        allowed = [word for module in args.allow for word in ('--allow', module)]
        return [*_config_flags(args.config, command[1:]), '--workdir', args.workdir, *allowed]
    if tuple(command[:2]) == ('sweep', 'create'):
        _, args = sweep.parse(command[1:])
        return ['--sweep', args.file, '--workdir', args.workdir or f'runs/{args.study}']
    raise UserError(
        'launch: --rehearse works with `train` and `sweep create`; before other commands, see '
        'rehearse --help'
    )


def print_row(row: Any) -> None:
    """Print the result, time, name and note of a check."""
    from rich.text import Text

    style = {'ok': 'green', 'failed': 'bold red'}.get(row.result, 'yellow')
    text = Text.assemble(
        (f'{row.result:<9}', style), f' {row.seconds:6.1f} s  ', (row.name, 'bold'), f'  {row.note}'
    )
    Console().print(text, soft_wrap=True)
