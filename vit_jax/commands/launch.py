"""Launch a command: as a Slurm job, or on Cloud TPUs."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import extras
from vit_jax.commands import preflight, rehearse, sweep, train
from vit_jax.commands._parser import Parser, overview
from vit_jax.config import load as config_lib
from vit_jax.errors import EXIT_FAILED, UserError, count, nearest, positive
from vit_jax.launch.command import require_installed


def main(argv: Sequence[str]) -> int:
    """Submits or runs the command after `--`, or prints what would be submitted."""
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
    return ACTIONS[flags[0]](args, command, config)


def parser(launcher: str) -> Parser:
    """The flags of one launcher."""
    made = Parser(f'launch {launcher}', ACTIONS[launcher].__doc__)
    made.epilog = 'What follows -- is a command of vit_jax with its flags: -- train --config ...'
    made.add_argument('--job-name', metavar='NAME', help='vit-jax-COMMAND by default')
    made.add_argument(
        '--restarts',
        type=count,
        default=3,
        metavar='N',
        help='of a job that failed; 3 by default',
    )
    made.add_argument('--dry-run', action='store_true', help='print what would be submitted')
    made.add_argument(
        '--rehearse', action='store_true', help='first try here what the run needs, see rehearse'
    )
    FLAGS[launcher](made)
    return made


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
    overrides, rest = config_lib.split_overrides(words)
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument('--config', nargs='?')
    file = flags.parse_known_args(rest)[0].config
    return config_lib.load(file, overrides) if file else None


def needed_extras(command: Sequence[str], config: ConfigDict | None) -> list[str]:
    """The extras of the package that a command needs.

    Args:
      command: with its flags, as `['train', '--config', ...]`.
      config: that it runs; None if this is not known here, as for a run in a bucket. It may then
        need the extras of any config.
    """
    from vit_jax.rehearsal import rehearsal

    found = extras.named_by_urls(command)
    found |= (
        extras.NAMED_BY_CONFIGS if config is None else rehearsal.needed_extras(config.to_dict())
    )
    return sorted(found | ({'sweep'} if command[0] == 'sweep' else set()))


def slurm(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a job to Slurm by sbatch."""
    from vit_jax.launch import slurm

    if config is not None:
        require_installed(needed_extras(command, config), f'launch slurm: {command[0]}')

    job = slurm.SlurmJob(
        command,
        _job_name(args, command),
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
    _rehearse(args, command)
    print(script if args.dry_run else f'submitted job {slurm.submit(script)}\n', end='')
    return 0


def sky(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a managed job to SkyPilot, which copies the current folder to the TPUs."""
    from vit_jax.launch import manifests

    if args.slices > 1:
        raise UserError(
            f'launch sky: --slices {args.slices}: SkyPilot rents one slice a job; launch tpu and '
            'launch gke take several'
        )
    job = manifests.SkyJob(
        **_for_clouds(args, command),
        extras=needed_extras(command, config),
        region=args.region,
        zone=args.zone,
        mounts=dict(args.mount),
    )
    task = manifests.task_text(job)
    if not args.dry_run and not pathlib.Path('constraints.txt').is_file():
        raise UserError(
            'launch sky copies the current folder: run it in the root of the repository'
        )
    _try_slice(args, command)
    print(task if args.dry_run else manifests.submit_task(job.name, task), end='')
    return 0


def tpu(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Rent Cloud TPUs by gcloud, run the command there, and rent again after preemption."""
    from vit_jax.launch import queued, remote, tpu_loop

    job = queued.TpuJob(
        **_for_clouds(args, command),
        zone=args.zone,
        project=args.project,
        extras=needed_extras(command, config),
        slices=args.slices,
        min_slices=args.min_slices or args.slices,
        flex_start=args.flex_start,
        prepare=args.setup,
        options=args.gcloud,
    )
    queued.check(job)
    _try_slice(args, command)
    if args.dry_run:
        print(queued.text(job), end='')
        return 0
    remote.files()
    return tpu_loop.Loop(job, tpu_loop.LoopTimes(args.poll, 60 * args.patience)).run()


def gke(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a JobSet to a GKE cluster by kubectl, on TPUs."""
    from vit_jax.launch import manifests

    job = manifests.GkeJob(
        **_for_clouds(args, command),
        image=args.image,
        slices=args.slices,
        topology=args.topology,
        flex_start=args.flex_start,
        queue=args.queue,
        namespace=args.namespace,
        account=args.service_account,
        mounts=dict(args.mount),
    )
    manifest = manifests.jobset_text(job)
    _try_slice(args, command)
    print(manifest if args.dry_run else manifests.create_jobset(manifest), end='')
    return 0


def _for_clouds(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The fields of `CloudJob`."""
    return {
        'words': command,
        'name': _job_name(args, command),
        'tpu': args.tpu,
        'spot': args.spot,
        'restarts': args.restarts,
        'env': dict(args.env),
    }


def _job_name(args: argparse.Namespace, command: Sequence[str]) -> str:
    return args.job_name or f'vit-jax-{command[0]}'


class RehearsalFailed(UserError):
    """A run that would fail was not launched."""

    exit_code = EXIT_FAILED


def _rehearse(args: argparse.Namespace, command: Sequence[str], topology: str = '') -> None:
    """Rehearse the command if asked; the report goes to standard error.

    Raises:
      RehearsalFailed: if something does not work.
      UserError: for a command that cannot be rehearsed.
    """
    if not args.rehearse:
        return
    words = rehearse.words_for(command)
    with contextlib.redirect_stdout(sys.stderr):  # --dry-run prints the job
        failed = rehearse.failures([*words, *(['--topology', topology] if topology else [])])
    if failed:
        reasons = '; '.join(f'{row.name}: {row.note}' for row in failed)
        raise RehearsalFailed(f'launch: the rehearsal failed, nothing was submitted: {reasons}')


def _try_slice(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Rehearse the command and compile its step for the slices, as far as asked."""
    if args.rehearse:
        _rehearse(args, command, f'{args.slices}x{args.tpu}' if args.slices > 1 else args.tpu)
    else:
        _preflight(args, command)


def _preflight(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Compile the training step for a slice if asked; the report goes to standard error.

    Raises:
      UserError: if the step does not fit there, or the command does not train.
    """
    if not args.preflight:
        return
    if command[0] != 'train':
        raise UserError('launch: --preflight works only with `train`')
    _, config = train.parse(command[1:])
    with contextlib.redirect_stdout(sys.stderr):  # --dry-run prints the job
        code = preflight.check(config, args.tpu)
    if code:
        raise UserError(f'launch: it does not fit on {args.tpu}; nothing was submitted')


ACTIONS: dict[str, Callable[[argparse.Namespace, Sequence[str], ConfigDict | None], int]] = {
    'slurm': slurm,
    'sky': sky,
    'tpu': tpu,
    'gke': gke,
}


def slurm_flags(made: Parser) -> None:
    """Add the flags of `launch slurm`."""
    made.add_argument('--nodes', type=positive, default=1, metavar='N')
    made.add_argument('--gpus', type=count, default=0, metavar='G', help='a node; one process each')
    made.add_argument(
        '--cpus-per-task', type=count, default=0, metavar='C', help='of each process, for loaders'
    )
    made.add_argument('--array', type=count, default=0, metavar='K', help='so many sweep workers')
    made.add_argument('--partition', default='', metavar='P')
    made.add_argument('--time', default='', metavar='T', help='the limit, as 12:00:00')
    made.add_argument(
        '--grace',
        type=positive,
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


def sky_flags(made: Parser) -> None:
    """Add the flags of `launch sky`."""
    _slices(made)
    made.add_argument('--region', default='')
    made.add_argument('--zone', default='')
    _preflight_flag(made)
    _env(made)
    _mount(made)


def tpu_flags(made: Parser) -> None:
    """Add the flags of `launch tpu`."""
    _slices(made)
    made.add_argument('--zone', required=True, help='as us-central1-a')
    made.add_argument('--project', default='', help="gcloud's own by default")
    made.add_argument(
        '--min-slices', type=positive, metavar='M', help='go on with so many; --slices by default'
    )
    made.add_argument(
        '--patience',
        type=count,
        default=30,
        metavar='MINUTES',
        help='to wait for slices before asking for one fewer, down to --min-slices; 30 by default',
    )
    made.add_argument(
        '--flex-start', default='', metavar='TIME', help='rent for at most so long, as 24h'
    )
    _preflight_flag(made)
    _env(made)
    made.add_argument(
        '--setup', default='', metavar='COMMAND', help='prepares each machine, as mounting a disk'
    )
    made.add_argument(
        '--gcloud',
        action='append',
        default=[],
        metavar='OPTION',
        help='one more of queued-resources create, as network=lab; may be repeated',
    )
    made.add_argument(
        '--poll',
        type=count,
        default=30,
        metavar='SECONDS',
        help='between checks; 30 by default',
    )


def gke_flags(made: Parser) -> None:
    """Add the flags of `launch gke`."""
    _slices(made)
    made.add_argument('--image', required=True, help='a container with the repository')
    made.add_argument(
        '--topology', default='', metavar='SHAPE', help='as 4x4; the usual by default'
    )
    made.add_argument('--flex-start', action='store_true', help='use nodes of flex-start')
    made.add_argument('--queue', default='', metavar='NAME', help='a LocalQueue of Kueue')
    made.add_argument('--namespace', default='', metavar='NAME', help="kubectl's own by default")
    made.add_argument(
        '--service-account', default='', metavar='NAME', help='of Kubernetes, with access to data'
    )
    _preflight_flag(made)
    _env(made)
    _mount(made)


def _slices(made: Parser) -> None:
    made.add_argument('--tpu', required=True, metavar='TYPE', help='the slice, as v5litepod-8')
    made.add_argument('--slices', type=positive, default=1, metavar='N', help='1 by default')
    made.add_argument('--spot', action='store_true', help='may be preempted; costs less')


def _preflight_flag(made: Parser) -> None:
    made.add_argument(
        '--preflight', action='store_true', help='first compile for the slice: does training fit?'
    )


def _env(made: Parser) -> None:
    made.add_argument(
        '--env',
        action='append',
        type=pair,
        default=[],
        metavar='NAME=VALUE',
        help='a variable of the command; may be repeated',
    )


def _mount(made: Parser) -> None:
    made.add_argument(
        '--mount',
        action='append',
        type=pair,
        default=[],
        metavar='/FOLDER=gs://BUCKET',
        help='a bucket as a folder; may be repeated',
    )


def pair(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`; raises ArgumentTypeError for any other text."""
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return name, value


FLAGS: dict[str, Callable[[Parser], None]] = {
    'gke': gke_flags,
    'sky': sky_flags,
    'slurm': slurm_flags,
    'tpu': tpu_flags,
}
