"""Sweep a config: create a study, work on its trials, show the results."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax import extras
from vit_jax.commands._parser import (
    STORAGE_HELP,
    Parser,
    add_allow_flag,
    add_subject,
    check_picture,
    overview,
    writing,
)
from vit_jax.commands.train import add_distributed_flags, initialize, step_timeout
from vit_jax.errors import EXIT_PREEMPTED, UserError, nearest, positive_number

PACKAGES = ('optuna', 'sqlalchemy')


def main(argv: Sequence[str]) -> int:
    """Run one action; return 0, or 75 when a worker was stopped with its state saved."""
    action, args = parse(argv)
    require_packages()
    return ACTIONS[action](args)


def parse(argv: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the action and its flags; raise UserError for a mistake in them."""
    if not argv or argv[0] in ('-h', '--help'):
        parsers = map(action_parser, ACTIONS)
        overview('sweep', __doc__, 'ACTION [flags]', parsers).parse_args(argv)
        raise UserError(f'sweep: choose one of {", ".join(ACTIONS)} (see sweep --help)')
    action, *flags = argv
    if action not in ACTIONS:
        raise UserError('sweep: ' + nearest('action', action, ACTIONS))
    return action, action_parser(action, flags).parse_args(flags)


def action_parser(action: str, argv: Sequence[str] = ()) -> Parser:
    """Make the parser of an action's flags."""
    parser = Parser(f'sweep {action}', ACTIONS[action].__doc__)
    if action == 'create':
        parser.add_argument('file', metavar='FILE[:ARG]', help='sweep file, which is executed')
        parser.add_argument('--study', required=True, metavar='STUDY', help='name of the new study')
    else:
        options = {'metavar': 'STUDY', 'help': 'name of the study'}
        add_subject(parser, argv, 'study', ('--study',), **options)
        parser.add_argument('--study', default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument('--storage', default='', metavar='URL', help=STORAGE_HELP)
    parser.add_argument('--workdir', metavar='DIR', help='folder of all runs (default: runs/STUDY)')
    if action == 'work':
        parser.add_argument(
            '--trials',
            type=positive_number,
            metavar='N',
            help='number of trials after which the worker stops (default: no limit)',
        )
        add_allow_flag(parser)
        add_distributed_flags(parser)
    if action == 'plot':
        parser.add_argument(
            '--out', metavar='PATH', help='picture to write (default: sweep.png in the workdir)'
        )
        parser.add_argument(
            '--x',
            metavar='KEY',
            help='dimension of the x axis of curves (default: evaluations of all trials)',
        )
        parser.add_argument(
            '--by', metavar='KEY', help='dimension with a curve for each value; needs --x'
        )
        parser.add_argument(
            '--panel', metavar='KEY', help='dimension with a panel for each value; needs --x'
        )
    return parser


def require_packages() -> None:
    """Raise UserError if a package that sweeps need is not installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise extras.missing_error('sweep', 'sweep', missing[0])


def create(args: argparse.Namespace) -> int:
    """Create a study from a sweep file and queue its trials."""
    from vit_jax.sweeps import space, study

    created = study.create(space.load_sweep(args.file), args.study, args.storage, args.workdir)
    count = len(created.sweep.queue())
    print(f'created {created.name}: {count} trials, runs in {created.folder}')
    return 0


def work(args: argparse.Namespace) -> int:
    """Run trials until none is left; any number of workers may run, and start again.

    With the flags of several processes, they form one worker with one trial at a time.
    """
    initialize(args)
    import jax

    from vit_jax.runtime import console, mesh, processes
    from vit_jax.sweeps import study, worker
    from vit_jax.trainer import train

    with console.drop_lost_output(), processes.fail_together():
        mesh.usable_devices()  # without a device every trial would fail
        opened = open_study(args)
        opened.require_allowed()
        study.require_shared_folder(opened)
        try:
            summary = worker.work(opened, args.trials, step_timeout(args))
        except train.Preempted as e:
            print(e)
            return EXIT_PREEMPTED
        if summary.failures:
            processes.barrier('the last trial is finished', processes.BARRIER_SECONDS)
            failure_note = (
                f'{len(summary.failures)} of {summary.finished} trials failed; the first: '
            )
            raise UserError(failure_note + summary.failures[0])
        if jax.process_index() == 0:
            print(f'trials finished by this worker: {summary.finished}')
    return 0


def retry(args: argparse.Namespace) -> int:
    """Queue the failed trials again; each resumes from its last checkpoint."""
    from vit_jax.sweeps import study

    print(f'trials queued again: {study.retry(open_study(args))}')
    return 0


def status(args: argparse.Namespace) -> int:
    """Show the number of trials in each state, and a line for each trial with its worker."""
    from vit_jax.runtime.console import Console, Table
    from vit_jax.sweeps import picture

    study = open_study(args)
    tally = '  '.join(f'{state} {count}' for state, count in picture.counts(study).items())
    console = Console(soft_wrap=True)
    sweep = study.sweep
    console.print(f'{study.name}: {sweep.direction} {sweep.metric} of {sweep.config}\n{tally}')
    table = Table()
    for heading in ('trial', 'state', 'step', sweep.metric, *sweep.dimensions()):
        table.add_column(heading, justify='left' if heading == 'state' else 'right')
    for row in picture.rows(study):
        table.add_row(*row)
    console.print(table)
    for line in picture.remarks(study):
        console.print(line)
    return 0


def best(args: argparse.Namespace) -> int:
    """Show the best trial of the best setting, and the command that repeats its training."""
    from vit_jax.sweeps import picture
    from vit_jax.sweeps.study import trial_title

    study = open_study(args)
    settings = picture.settings(study)
    setting, trial = settings[0], settings[0].trials[0]
    if setting.half is None:
        print(f'{trial_title(trial)}: {study.sweep.metric} {picture.value(trial)}')
    else:
        print(f'{study.sweep.metric} {picture.over_seeds(setting)}')
        print(f'{trial_title(trial)}, its best: {picture.value(trial)}')
    for name, value in trial.params.items():
        print(f'  {name} = {value}')
    if setting.half is None and len(settings) > 1:
        print('one seed for each setting: a repetition may be worse')
    elif len(settings) > 1:
        print(f'next: {picture.over_seeds(settings[1])}')
    print(f'run folder: {trial.user_attrs["folder"]}')
    print(picture.command(study, trial))
    return 0


def plot(args: argparse.Namespace) -> int:
    """Draw the evaluations of all trials, and their values over the dimensions."""
    from vit_jax.sweeps import picture

    if args.out:
        check_picture(args.out, '--out')
    if args.x is None and (args.by or args.panel):
        raise UserError('sweep plot: --by and --panel need --x')
    study = open_study(args)
    output = args.out or study.folder / 'sweep.png'
    with writing(output, '--out'):
        if args.x is None:
            print(picture.plot(study, output))
        else:
            dimensions = picture.Dimensions(args.x, args.by, args.panel)
            print(picture.plot_curves(study, dimensions, output))
    return 0


def open_study(args: argparse.Namespace) -> Any:
    """Open the study that the flags name."""
    from vit_jax.sweeps import study

    allowed = getattr(args, 'allow', ())
    return study.open_study(args.study, args.storage, args.workdir, allowed)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    'create': create,
    'work': work,
    'retry': retry,
    'status': status,
    'best': best,
    'plot': plot,
}
