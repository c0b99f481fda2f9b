"""Try in minutes what a run needs, before it waits in a queue: data, folder, steps, resumption."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.commands import sweep
from vit_jax.commands._parser import Parser, add_allow_flag
from vit_jax.commands.train import run_folder_name
from vit_jax.config import load as config_lib
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.runtime.console import status


def main(argv: Sequence[str]) -> int:
    """Prints a table, or JSON, of what was tried; 1 if something does not work."""
    return EXIT_FAILED if failures(argv) else 0


def failures(argv: Sequence[str]) -> list[Any]:
    """Print a table, or JSON, of what was tried, and return the rows of what does not work."""
    parser = make_parser()
    args, config = config_lib.parse_config_args(parser, argv)
    if (config is None) == (args.sweep is None):
        raise UserError('rehearse needs one of --config FILE[:ARG] and --sweep FILE[:ARG]')
    if args.minutes <= 0:
        raise UserError(f'--minutes {args.minutes:g}: must be positive')
    if args.price is not None and args.topology is None:
        raise UserError('--price is of the chip-hours that --topology finds: give both')
    rows = []
    for name, one in configs(config, args.sweep):
        for row in tried(one, args):
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
    """The flags beside those of the config."""
    parser = Parser('rehearse', __doc__)
    add = parser.add_argument
    add('--workdir', required=True, type=run_folder_name, help='the folder of the run to come')
    add('--sweep', metavar='FILE[:ARG]', help='the first and the last run of a sweep')
    add('--topology', metavar='SLICE', help='preflight too, for a TPU slice such as v5e:4x4')
    add('--price', type=float, metavar='X', help='of a chip-hour, for --topology')
    add(
        '--minutes',
        type=float,
        default=30.0,
        metavar='M',
        help='to wait for the first checkpoint, and for the resumption (default: 30)',
    )
    add('--json', action='store_true', help='print JSON only')
    add_allow_flag(parser)
    return parser


def configs(config: ConfigDict | None, sweep: str | None) -> Iterator[tuple[str, ConfigDict]]:
    """The config by itself, or the first and the last of a sweep with their points.

    Raises:
      UserError: for a mistake in the config of any point.
    """
    if config is not None:
        yield '', config
        return
    from vit_jax.sweeps import space

    assert sweep is not None
    points = space.load(sweep, 'rehearse')
    made = {_words(point): space.config_of(points, point) for point in points.queue()}
    chosen = list(made.items())
    yield from chosen[:1] + chosen[1:][-1:]


def _words(point: Any) -> str:
    return ', '.join(f'{key}={value}' for key, value in point.items())


def tried(config: ConfigDict, args: Any) -> Iterator[Any]:
    """The rows of a rehearsal; a spinner turns while one is awaited."""
    from vit_jax.rehearsal.rehearsal import rehearse

    rows = rehearse(config, args.workdir, args.allow, args.minutes)
    while True:
        with status('rehearsing'):
            row = next(rows, None)
        if row is None:
            return
        yield row


def preflight(argv: Sequence[str], args: Any) -> Any:
    """The row of compiling for a slice; what `preflight` prints is printed."""
    from vit_jax.rehearsal import kill_and_resume

    words = list(preflight_words(argv))
    command = [sys.executable, '-m', 'vit_jax', 'preflight', *words]
    with status(f'compiling for {args.topology}'):
        row, output = kill_and_resume.of_command('preflight', command)
    if not args.json:
        print(output, end='')
    return row


def preflight_words(argv: Sequence[str]) -> Iterable[str]:
    """The flags that `preflight` has too, and those of the config."""
    return _kept(argv, ('--config', '--sweep', '--topology', '--price'))


def words_for(command: Sequence[str]) -> list[str]:
    """The flags that rehearse a command of `launch`.

    Raises:
      UserError: for a command whose config is not known here.
    """
    if command[0] == 'train':
        return list(_kept(command[1:], ('--config', '--workdir', '--allow')))
    if tuple(command[:2]) == ('sweep', 'create'):
        _, args = sweep.parse(command[1:])
        return ['--sweep', args.file, '--workdir', args.workdir or f'runs/{args.study}']
    raise UserError(
        'launch: --rehearse works with `train` and `sweep create`; before other commands, see '
        'vit_jax rehearse --help'
    )


def _kept(argv: Sequence[str], kept: Sequence[str]) -> Iterator[str]:
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition('=')
        if flag in kept or flag.startswith('--config.'):
            yield word
            if not equals:
                yield next(words)


def print_row(row: Any) -> None:
    """Print what was tried, its result and time, and what was found."""
    from rich.text import Text

    from vit_jax.runtime.console import Console

    style = {'ok': 'green', 'failed': 'bold red'}.get(row.result, 'yellow')
    text = Text.assemble(
        (f'{row.result:<9}', style), f' {row.seconds:6.1f} s  ', (row.name, 'bold'), f'  {row.note}'
    )
    Console().print(text, soft_wrap=True)
