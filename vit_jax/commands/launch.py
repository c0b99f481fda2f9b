"""Launch a command as a Slurm job or on Cloud TPUs."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import extras
from vit_jax.commands import preflight, rehearse, sweep, train
from vit_jax.commands._parser import Parser, find_parser, overview
from vit_jax.config import load
from vit_jax.errors import EXIT_FAILED, UserError, nearest, positive_number, whole_number
from vit_jax.launch.command import require_installed

# Commands with a positional config; `train` is parsed by itself.
WITH_CONFIG = ('benchmark', 'data', 'preflight', 'rehearse')


class Launcher(NamedTuple):
    """Launcher of a command.

    Attributes:
      submit: (flags, command, its config if known) -> exit code.
      add_flags: Function that adds its flags to a parser.
    """

    submit: Callable[[argparse.Namespace, Sequence[str], ConfigDict | None], int]
    add_flags: Callable[[Parser], None]


def main(argv: Sequence[str]) -> int:
    """Submit or run the command after `--`, or print the job with `--dry-run`.

    Raises:
      UserError: The launcher is unknown.
    """
    from vit_jax.__main__ import commands

    flags, command = list(argv), []
    if '--' in flags:
        end = flags.index('--')
        flags, command = flags[:end], flags[end + 1 :]
    if not flags or flags[0] in ('-h', '--help'):
        usage = 'LAUNCHER [flags] -- COMMAND [its flags]'
        overview('launch', __doc__, usage, map(launcher_parser, ACTIONS)).parse_args(flags)
        raise UserError(f'launch: choose one of {", ".join(ACTIONS)} (see launch --help)')
    if flags[0] not in ACTIONS:
        raise UserError('launch: ' + nearest('launcher', flags[0], ACTIONS))
    if not command and (start := next((w for w in flags[1:] if w in commands()), '')):
        raise UserError(f'launch: put -- before the command: launch {flags[0]} ... -- {start} ...')
    args = launcher_parser(flags[0]).parse_args(flags[1:])
    config = check_command(command)
    return ACTIONS[flags[0]].submit(args, command, config)


def launcher_parser(launcher: str) -> Parser:
    """Make the parser of a launcher's flags."""
    action = ACTIONS[launcher]
    parser = Parser(f'launch {launcher}', action.submit.__doc__)
    parser.epilog = 'After -- comes a command of vit_jax with its flags: -- train CONFIG ...'
    add = parser.add_argument
    add('--job-name', metavar='NAME', help='job name (default: vit-jax-COMMAND)')
    add(
        '--restarts',
        type=whole_number,
        default=3,
        metavar='N',
        help='number of restarts after failures of the job (default: 3)',
    )
    add('--dry-run', action='store_true', help='print the job instead of submitting it')
    add('--rehearse', action='store_true', help='first try the run on this machine, see rehearse')
    action.add_flags(parser)
    parser.set_defaults(launcher=launcher)
    return parser


def check_command(command: Sequence[str]) -> ConfigDict | None:
    """Check the command's name, flags, config and sweep before anything is queued.

    Returns:
      Config that the command runs; None if unknown here.

    Raises:
      UserError: The command has a mistake that it would report hours later.
    """
    from vit_jax.__main__ import commands

    if not command:
        raise UserError('launch: give a command: -- train CONFIG --workdir FOLDER')
    if command[0] == 'launch' or command[0] not in commands():
        raise UserError('launch: ' + nearest('command', command[0], set(commands()) - {'launch'}))
    flags = command[1:]
    if command[0] == 'train':
        return train.parse(flags)[1]
    if command[0] != 'sweep':
        return _check_config(command[0], flags)
    action, args = sweep.parse(flags)
    return _check_sweep(args.file) if action == 'create' else None


def _check_sweep(file: str) -> ConfigDict:
    sweep.require_packages()
    from vit_jax.sweeps import space, study

    return study.load_base(space.load_sweep(file))


def _check_config(command: str, argv: Sequence[str]) -> ConfigDict | None:
    overrides, flags = load.split_overrides(argv)
    if command in WITH_CONFIG:
        args = find_parser(command).parse_args(flags)
        file = args.config or args.subject
    else:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument('--config', nargs='?')
        file = parser.parse_known_args(flags)[0].config
    return load.load(file, overrides) if file else None


def find_extras(command: Sequence[str], config: ConfigDict | None) -> list[str]:
    """Find the extras of the package that a command needs.

    Args:
      command: Command with its flags, such as `['train', '--config', ...]`.
      config: Config that it runs; None if unknown here, for example of a run in a bucket, which
        may need the extras of any config.
    """
    from vit_jax.rehearsal import rehearsal

    names = extras.named_by_urls(command)
    names |= (
        extras.NAMED_BY_CONFIGS if config is None else rehearsal.needed_extras(load.to_run(config))
    )
    return sorted(names | ({'sweep'} if command[0] == 'sweep' else set()))


def slurm(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a job to Slurm with sbatch."""
    from vit_jax.launch import slurm

    if config is not None:
        require_installed(find_extras(command, config), f'launch slurm: {command[0]}')

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
        memory=args.mem_per_cpu,
        options=args.sbatch,
        python=sys.executable,
    )
    script = slurm.script(job)
    _rehearse(args, command)
    print(script if args.dry_run else f'submitted job {slurm.submit(script)}\n', end='')
    return 0


def sky(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a managed job to SkyPilot; it copies the current folder to the TPUs."""
    from vit_jax.launch import manifests

    if args.slices > 1:
        raise UserError(
            f'launch sky: --slices {args.slices}: SkyPilot rents one slice per job; use launch tpu '
            'or launch gke'
        )
    job = manifests.SkyJob(
        **_cloud_job_fields(args, command),
        extras=find_extras(command, config),
        region=args.region,
        zone=args.zone,
        mounts=dict(args.mount),
    )
    task = manifests.task_text(job)
    if not args.dry_run and not pathlib.Path('constraints.txt').is_file():
        raise UserError(
            'launch sky copies the current folder: run it in the root of the repository'
        )
    _rehearse_or_preflight(args, command)
    print(task if args.dry_run else manifests.submit_task(job.name, task), end='')
    return 0


def tpu(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Rent Cloud TPUs with gcloud, run the command there, and rent again after preemption."""
    from vit_jax.launch import queued, remote, tpu_loop

    job = queued.TpuJob(
        **_cloud_job_fields(args, command),
        zone=args.zone,
        project=args.project,
        extras=find_extras(command, config),
        slices=args.slices,
        min_slices=args.min_slices or args.slices,
        flex_start=args.flex_start,
        prepare=args.setup,
        options=args.gcloud,
    )
    queued.check_job(job)
    _rehearse_or_preflight(args, command)
    if args.dry_run:
        print(queued.text(job), end='')
        return 0
    remote.files()
    return tpu_loop.Loop(job, tpu_loop.LoopTimes(args.poll, 60 * args.patience)).run()


def gke(args: argparse.Namespace, command: Sequence[str], config: ConfigDict | None) -> int:
    """Submit a JobSet to TPUs of a GKE cluster with kubectl."""
    from vit_jax.launch import manifests

    job = manifests.GkeJob(
        **_cloud_job_fields(args, command),
        image=args.image,
        slices=args.slices,
        topology=args.topology or args.tpu.partition(':')[2],
        flex_start=args.flex_start,
        queue=args.queue,
        namespace=args.namespace,
        account=args.service_account,
        mounts=dict(args.mount),
    )
    manifest = manifests.jobset_text(job)
    _rehearse_or_preflight(args, command)
    print(manifest if args.dry_run else manifests.create_jobset(manifest), end='')
    return 0


def _cloud_job_fields(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Collect the fields that all cloud jobs share."""
    from vit_jax.launch import cloud_tpu

    tpu, shape = cloud_tpu.accelerator_type(args.tpu), args.tpu.partition(':')[2]
    if shape and args.launcher != 'gke' and shape != cloud_tpu.topology(tpu):
        raise UserError(f'launch: --tpu {args.tpu}: only launch gke offers this shape of {tpu}')
    return {
        'args': command,
        'name': _job_name(args, command),
        'tpu': tpu,
        'spot': args.spot,
        'restarts': args.restarts,
        'env': dict(args.env),
    }


def _job_name(args: argparse.Namespace, command: Sequence[str]) -> str:
    return args.job_name or f'vit-jax-{command[0]}'


class RehearsalFailed(UserError):
    """Failure of a rehearsal, after which the run is not launched."""

    exit_code = EXIT_FAILED


def _rehearse(args: argparse.Namespace, command: Sequence[str], topology: str = '') -> None:
    """Rehearse the command with `--rehearse`; the report goes to standard error.

    Raises:
      RehearsalFailed: A check fails.
      UserError: The command cannot be rehearsed.
    """
    if not args.rehearse:
        return
    flags = rehearse.rehearsal_flags(command)
    with contextlib.redirect_stdout(sys.stderr):  # --dry-run prints the job
        failed = rehearse.print_rehearsal([*flags, *(['--topology', topology] if topology else [])])
    if failed:
        reasons = '; '.join(f'{row.name}: {row.note}' for row in failed)
        raise RehearsalFailed(f'launch: the rehearsal failed, nothing was submitted: {reasons}')


def _rehearse_or_preflight(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Rehearse the command, or only compile its step for the slices, depending on the flags."""
    if args.rehearse:
        _rehearse(args, command, f'{args.slices}x{args.tpu}' if args.slices > 1 else args.tpu)
    else:
        _preflight(args, command)


def _preflight(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Compile the training step for a slice with `--preflight`; the report goes to standard error.

    Raises:
      UserError: The step does not fit, or the command is not `train`.
    """
    if not args.preflight:
        return
    if command[0] != 'train':
        raise UserError('launch: --preflight works only with `train`')
    _, config = train.parse(command[1:])
    with contextlib.redirect_stdout(sys.stderr):  # --dry-run prints the job
        code = preflight.check_fit(config, args.tpu)
    if code:
        raise UserError(f'launch: the step does not fit on {args.tpu}; nothing was submitted')


def add_slurm_flags(parser: Parser) -> None:
    """Add the flags of `launch slurm`."""
    add = parser.add_argument
    add(
        '--nodes', type=positive_number, default=1, metavar='N', help='number of nodes (default: 1)'
    )
    add(
        '--gpus',
        type=whole_number,
        default=0,
        metavar='G',
        help='GPUs per node, with one process each (default: 0)',
    )
    add(
        '--cpus-per-task',
        type=whole_number,
        default=4,
        metavar='C',
        help="CPU cores per process; 0 for the cluster's default (default: 4)",
    )
    add(
        '--mem-per-cpu',
        default='4G',
        metavar='M',
        help="memory per CPU core; '' for the cluster's default (default: 4G)",
    )
    add(
        '--array',
        type=whole_number,
        default=0,
        metavar='K',
        help='number of sweep workers to start (default: 0, no array)',
    )
    add('--partition', default='', metavar='P', help="partition (default: the cluster's)")
    add(
        '--time',
        default='',
        metavar='T',
        help="time limit, such as 12:00:00 (default: the partition's)",
    )
    add(
        '--grace',
        type=positive_number,
        default=120,
        metavar='SECONDS',
        help='seconds before the time limit at which the job saves (default: 120)',
    )
    add(
        '--sbatch',
        action='append',
        default=[],
        metavar='OPTION',
        help='further option of sbatch, such as account=vision; may be repeated',
    )


def add_sky_flags(parser: Parser) -> None:
    """Add the flags of `launch sky`."""
    _add_slice_flags(parser)
    parser.add_argument('--region', default='', help='region, such as us-central1 (default: any)')
    parser.add_argument('--zone', default='', help='zone, such as us-central1-a (default: any)')
    _add_preflight_flag(parser)
    _add_env_flag(parser)
    _add_mount_flag(parser)


def add_tpu_flags(parser: Parser) -> None:
    """Add the flags of `launch tpu`."""
    _add_slice_flags(parser)
    add = parser.add_argument
    add('--zone', required=True, help='zone, such as us-central1-a')
    add('--project', default='', help="Google Cloud project (default: gcloud's)")
    add(
        '--min-slices',
        type=positive_number,
        metavar='M',
        help='least number of slices to continue with (default: --slices)',
    )
    add(
        '--patience',
        type=whole_number,
        default=30,
        metavar='MINUTES',
        help='minutes to wait before asking for one slice fewer (default: 30)',
    )
    add('--flex-start', default='', metavar='TIME', help='longest time to rent, such as 24h')
    _add_preflight_flag(parser)
    _add_env_flag(parser)
    add(
        '--setup',
        default='',
        metavar='COMMAND',
        help='shell command that each machine runs first, for example to mount a disk',
    )
    add(
        '--gcloud',
        action='append',
        default=[],
        metavar='OPTION',
        help='further option of queued-resources create, such as network=lab; may be repeated',
    )
    add(
        '--poll',
        type=whole_number,
        default=30,
        metavar='SECONDS',
        help='seconds between checks of the job (default: 30)',
    )


def add_gke_flags(parser: Parser) -> None:
    """Add the flags of `launch gke`."""
    _add_slice_flags(parser)
    add = parser.add_argument
    add('--image', required=True, help='container image with the repository')
    add(
        '--topology',
        default='',
        metavar='SHAPE',
        help="slice topology, such as 4x4 (default: the type's usual one)",
    )
    add('--flex-start', action='store_true', help='use flex-start nodes')
    add('--queue', default='', metavar='NAME', help='LocalQueue of Kueue')
    add('--namespace', default='', metavar='NAME', help="Kubernetes namespace (default: kubectl's)")
    add(
        '--service-account',
        default='',
        metavar='NAME',
        help='Kubernetes service account with access to the data',
    )
    _add_preflight_flag(parser)
    _add_env_flag(parser)
    _add_mount_flag(parser)


def _add_slice_flags(parser: Parser) -> None:
    add = parser.add_argument
    add('--tpu', required=True, metavar='TYPE', help='slice, such as v5e-8, v5litepod-8 or v5e:2x4')
    add(
        '--slices',
        type=positive_number,
        default=1,
        metavar='N',
        help='number of slices (default: 1)',
    )
    add('--spot', action='store_true', help='rent preemptible TPUs, which cost less')


def _add_preflight_flag(parser: Parser) -> None:
    parser.add_argument(
        '--preflight', action='store_true', help='first compile for the slice and check the memory'
    )


def _add_env_flag(parser: Parser) -> None:
    parser.add_argument(
        '--env',
        action='append',
        type=name_and_value,
        default=[],
        metavar='NAME=VALUE',
        help='environment variable of the command; may be repeated',
    )


def _add_mount_flag(parser: Parser) -> None:
    parser.add_argument(
        '--mount',
        action='append',
        type=name_and_value,
        default=[],
        metavar='/FOLDER=gs://BUCKET',
        help='folder where a bucket is mounted; may be repeated',
    )


def name_and_value(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`; raise ArgumentTypeError for any other text."""
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return name, value


ACTIONS = {
    'slurm': Launcher(slurm, add_slurm_flags),
    'sky': Launcher(sky, add_sky_flags),
    'tpu': Launcher(tpu, add_tpu_flags),
    'gke': Launcher(gke, add_gke_flags),
}
