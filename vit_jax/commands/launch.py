"""Launch a command: as a Slurm job, or on Cloud TPUs by SkyPilot."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from vit_jax.commands import preflight, sweep, train
from vit_jax.commands._parser import Parser, overview
from vit_jax.config import flags as config_flags
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError, nearest
from vit_jax.launch.command import extras_of, require_installed


def main(argv: Sequence[str]) -> int:
    """Submits the command after `--`, or prints the script that would be submitted."""
    words = list(argv)
    flags, command = words, []
    if '--' in words:
        cut = words.index('--')
        flags, command = words[:cut], words[cut + 1 :]
    if not flags or flags[0] in ('-h', '--help'):
        usage = 'LAUNCHER [flags] -- COMMAND [its flags]'
        overview('launch', __doc__, usage, map(parser, ACTIONS)).parse_args(flags)
        raise UserError(f'launch: choose one of {", ".join(ACTIONS)} (see vit_jax launch --help)')
    if flags[0] not in ACTIONS:
        raise UserError('launch: ' + nearest('launcher', flags[0], ACTIONS))
    args = parser(flags[0]).parse_args(flags[1:])
    config = check(command)
    print(ACTIONS[flags[0]](args, command, config), end='')
    return 0


def parser(launcher: str) -> Parser:
    """The flags of one launcher."""
    made = Parser(f'launch {launcher}', ACTIONS[launcher].__doc__)
    made.epilog = 'What follows -- is a command of vit_jax with its flags: -- train --config ...'
    made.add_argument('--job-name', metavar='NAME', help='vit-jax-COMMAND by default')
    made.add_argument(
        '--restarts', type=_count, default=3, metavar='N', help='of a job that failed; 3 by default'
    )
    made.add_argument('--dry-run', action='store_true', help='print what would be submitted')
    {'slurm': _slurm_flags, 'sky': _sky_flags}[launcher](made)
    return made


def _slurm_flags(made: Parser) -> None:
    made.add_argument('--nodes', type=_positive, default=1, metavar='N')
    made.add_argument(
        '--gpus', type=_count, default=0, metavar='G', help='a node; one process each'
    )
    made.add_argument(
        '--cpus-per-task', type=_count, default=0, metavar='C', help='of each process, for loaders'
    )
    made.add_argument('--array', type=_count, default=0, metavar='K', help='so many sweep workers')
    made.add_argument('--partition', default='', metavar='P')
    made.add_argument('--time', default='', metavar='T', help='the limit, as 12:00:00')
    made.add_argument(
        '--grace',
        type=_positive,
        default=120,
        metavar='SECONDS',
        help='the job gets the signal to save its state so long before the limit; 120 by default',
    )
    made.add_argument(
        '--sbatch',
        action='append',
        default=[],
        metavar='OPTION',
        help='one more of sbatch, as account=vision; may be repeated',
    )


def _sky_flags(made: Parser) -> None:
    made.add_argument('--tpu', required=True, metavar='TYPE', help='the slice, as v5litepod-8')
    made.add_argument('--spot', action='store_true', help='may be preempted; costs less')
    made.add_argument('--region', default='')
    made.add_argument(
        '--preflight', action='store_true', help='first compile for the slice: does training fit?'
    )
    made.add_argument('--zone', default='')
    for flag, metavar, what in (
        ('--env', 'NAME=VALUE', 'a variable of the command; may be repeated'),
        ('--mount', '/FOLDER=gs://BUCKET', 'a bucket as a folder; may be repeated'),
    ):
        made.add_argument(flag, action='append', type=_pair, default=[], metavar=metavar, help=what)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number')
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return name, value


def _positive(text: str) -> int:
    if not (number := _count(text)):
        raise argparse.ArgumentTypeError('must be at least 1')
    return number


def check(command: Sequence[str]) -> ConfigDict | None:
    """Check the command before anything is queued: its name, flags, config and sweep.

    Returns:
      The config that it runs; None if that is not known here.

    Raises:
      UserError: as the command itself would, hours later.
    """
    from vit_jax.__main__ import commands

    if not command:
        raise UserError('launch: give a command: -- train --config FILE --workdir FOLDER')
    if command[0] == 'launch' or command[0] not in commands():
        raise UserError('launch: ' + nearest('command', command[0], set(commands()) - {'launch'}))
    words = command[1:]
    if command[0] == 'train':
        return train.parse(words)[1]
    if command[0] != 'sweep':
        return _check_config(words)
    action, args = sweep.parse(words)
    return _check_sweep(args.file) if action == 'create' else None


def _check_sweep(file: str) -> ConfigDict:
    sweep.require_packages()
    from vit_jax.sweeps import space, study

    return study.load_base(space.load(file))


def _check_config(words: Sequence[str]) -> ConfigDict | None:
    overrides, rest = config_flags.split(words)
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument('--config', nargs='?')
    file = flags.parse_known_args(rest)[0].config
    return config_lib.load(file, overrides) if file else None


def slurm(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> str:
    """Submit a job to Slurm by sbatch."""
    from vit_jax.launch import slurm, submit

    if config is not None:
        require_installed(extras_of(command, config), f'launch slurm: {command[0]}')

    job = slurm.SlurmJob(
        command,
        args.job_name or f'vit-jax-{command[0]}',
        nodes=args.nodes,
        gpus=args.gpus,
        array=args.array,
        partition=args.partition,
        time=args.time,
        grace=args.grace,
        restarts=args.restarts,
        cpus=args.cpus_per_task,
        options=args.sbatch,
        python=sys.executable,
    )
    script = slurm.script(job)
    return script if args.dry_run else f'submitted job {submit.slurm(script)}\n'


def sky(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> str:
    """Submit a managed job to SkyPilot, which copies the current folder to the TPUs."""
    from vit_jax.launch import sky, submit

    if args.preflight:
        _preflight(args.tpu, command)
    name = args.job_name or f'vit-jax-{command[0]}'
    task = sky.text(
        sky.SkyJob(
            command,
            name,
            tpu=args.tpu,
            extras=extras_of(command, config),
            spot=args.spot,
            region=args.region,
            zone=args.zone,
            restarts=args.restarts,
            env=dict(args.env),
            mounts=dict(args.mount),
        )
    )
    if args.dry_run:
        return task
    if not pathlib.Path('constraints.txt').is_file():
        raise UserError(
            'launch sky copies the current folder: run it in the root of the repository'
        )
    return submit.sky(name, task)


def _preflight(tpu: str, command: Sequence[str]) -> None:
    """Compile the training step for the slice; the report goes to standard error.

    Raises:
      UserError: if the step does not fit there, or the command does not train.
    """
    if command[0] != 'train':
        raise UserError('launch sky: --preflight works only with `train`')
    _, config = train.parse(command[1:])
    with contextlib.redirect_stdout(sys.stderr):  # --dry-run prints the job
        code = preflight.check(config, tpu)
    if code:
        raise UserError(f'launch sky: it does not fit on {tpu}; nothing was submitted')


ACTIONS: dict[str, Callable[[argparse.Namespace, Sequence[str], ConfigDict | None], str]] = {
    'slurm': slurm,
    'sky': sky,
}
