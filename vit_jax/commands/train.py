"""Train a model from a config; the same command resumes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax.commands._parser import Parser, add_allow_flag
from vit_jax.config.load import parse_config_args, to_run
from vit_jax.errors import EXIT_PREEMPTED, UserError, positive_number
from vit_jax.storage import paths, run_folder

STEP_TIMEOUT = 1800.0
HELP_CONFIG = '--help-config'


def main(argv: Sequence[str]) -> int:
    """Train to the end; return 0 when complete, 75 when stopped with the state saved."""
    args, config = parse(argv)
    if args.help_config:
        print_keys(config)
        return 0
    initialize(args)
    import jax

    from vit_jax.config import objects
    from vit_jax.runtime import console, process, processes
    from vit_jax.trainer import evaluate, train

    with console.drop_lost_output(), processes.fail_together():
        try:
            result = train.train(
                config,
                args.workdir,
                stop_at=args.stop_at,
                restart=args.restart,
                extend=args.extend,
                step_timeout=step_timeout(args),
                allowed=args.allow,
                strict=args.strict,
                profile=train.Window(*args.profile) if args.profile else None,
                began=process.start_time(),
            )
        except train.Preempted as e:
            print(e)
            return EXIT_PREEMPTED
        if jax.process_index() == 0:
            run = to_run(config)
            headlines = {k: objects.headline(entry, run.task) for k, entry in run.evals.items()}
            numbers = evaluate.line(headlines, result)
            print(f'complete: {numbers}\n{args.workdir}: see curves.png and metrics.jsonl')
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, ConfigDict]:
    """Return the flags and the config; raise UserError for a mistake in either."""
    parser = Parser('train', __doc__)
    parser.add_argument(
        '--workdir',
        required=HELP_CONFIG not in argv,
        type=run_folder_name,
        help='run folder, created if missing',
    )
    parser.add_argument(
        HELP_CONFIG,
        action='store_true',
        help='print every key of the config with its value, type, default and meaning',
    )
    parser.add_argument(
        '--stop-at',
        type=positive_number,
        metavar='STEP',
        help='step after which the run saves and stops',
    )
    parser.add_argument(
        '--restart',
        action='store_true',
        help='start over if every checkpoint is damaged or lost; the remains are moved aside',
    )
    parser.add_argument(
        '--extend',
        action='store_true',
        help='continue an existing run to a larger config.total, if the longer run has the same '
        'learning rates so far',
    )
    parser.add_argument(
        '--strict',
        action='store_true',
        help='fail if the newest checkpoint is damaged, instead of resuming from an older one',
    )
    parser.add_argument(
        '--profile',
        type=profile_steps,
        metavar='N|FIRST:LAST',
        help='number of steps, or first and last step, that are traced into profile/ of the run '
        'folder; prints a breakdown of their time',
    )
    add_allow_flag(parser)
    add_distributed_flags(parser)
    args, config = parse_config_args(parser, argv, complete=HELP_CONFIG not in argv)
    if config is None:
        raise UserError('train needs a config: train CONFIG')
    return args, config


def print_keys(config: ConfigDict) -> None:
    """Print a table of each section's keys; keys at their defaults are dim."""
    from vit_jax.commands import _config_keys
    from vit_jax.runtime.console import Console, Table

    console = Console()
    for section, keys in _config_keys.config_keys(config).items():
        table = Table('key', 'value', 'type', 'default', 'meaning')
        table.columns[0].no_wrap = True
        table.title, table.title_justify = section, 'left'
        for key in keys:
            style = 'dim' if key.value == key.default else None
            table.add_row(key.name, key.value, key.type, key.default, key.line, style=style)
        console.print(table)
        console.print()


def profile_steps(text: str) -> tuple[int, int | None]:
    """Parse the number of steps and the first: '5' -> (5, None), '10:15' -> (6, 10).

    Raises:
      UserError: The text is anything else.
    """
    match = re.fullmatch(r'(?:([1-9]\d{0,9}):)?([1-9]\d{0,9})', text)
    first, last = (match[1], int(match[2])) if match else (None, 0)
    count = last - int(first) + 1 if first else last
    if count < 1:
        raise UserError(f'--profile {text}: give a number of steps, or FIRST:LAST such as 10:15')
    return count, int(first) if first else None


def run_folder_name(text: str) -> str:
    """Return the text if its folder is writable or contains a complete run, before slow imports.

    Raises:
      UserError: The folder is neither writable nor a complete run.
    """
    folder = paths.path(text)
    if not paths.is_remote(folder) and not (folder / run_folder.RESULT).is_file():
        run_folder.require_writable(folder)
    return text


def add_distributed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `initialize` and `step_timeout` read."""
    group = parser.add_argument_group('several processes')
    group.add_argument('--distributed', action='store_true', help='fail if no cluster is found')
    group.add_argument('--coordinator', metavar='HOST:PORT', help='address of process 0')
    group.add_argument('--num-processes', type=int, metavar='N', help='number of processes')
    group.add_argument('--process-id', type=int, metavar='I', help='this process, from 0')
    group.add_argument(
        '--heartbeat',
        type=int,
        metavar='SECONDS',
        help='seconds of silence after which a process is dead',
    )
    group.add_argument(
        '--step-timeout',
        type=float,
        metavar='SECONDS',
        help='longest time of a step, evaluation or save, after which all stacks are printed and '
        f'the process exits (default: {STEP_TIMEOUT:g} with several processes, else 0, no limit)',
    )


def initialize(args: argparse.Namespace) -> None:
    """Set up the compilation cache, and join the other processes of the job, if any.

    Raises:
      UserError: The flags contradict each other, or the other processes cannot be reached.
    """
    check_job(args.coordinator, args.num_processes, args.process_id, args.distributed)
    from vit_jax.runtime import compile_cache, processes

    compile_cache.enable()
    if args.distributed or args.coordinator:
        processes.initialize(args.coordinator, args.num_processes, args.process_id, args.heartbeat)
    else:
        processes.join_cluster(args.heartbeat)


def check_job(coordinator: str | None, count: int | None, number: int | None, detect: bool) -> None:
    """Raise UserError for inconsistent `--coordinator`, `--num-processes` and `--process-id`.

    Args:
      coordinator, count, number: Values of these flags.
      detect: Whether `--distributed` is given, which detects the missing values.
    """
    if coordinator is None and not detect and (count, number) != (None, None):
        raise UserError('--num-processes and --process-id need --coordinator HOST:PORT')
    if coordinator is not None and not re.fullmatch(r'.+:\d+', coordinator):
        raise UserError(f'--coordinator {coordinator!r}: write HOST:PORT')
    if count is not None and count < 1:
        raise UserError(f'--num-processes {count}: must be at least 1')
    if number is not None and not 0 <= number < (count or number + 1):
        raise UserError(f'--process-id {number}: must be 0 or more, and below --num-processes')


def step_timeout(args: argparse.Namespace) -> float | None:
    """Parse `--step-timeout` in seconds, None for no limit; call it after `initialize`.

    Raises:
      UserError: It is negative or infinite.
    """
    from vit_jax.runtime import processes

    seconds = args.step_timeout
    if seconds is None:
        seconds = STEP_TIMEOUT if processes.count() > 1 else 0
    if not 0 <= seconds < float('inf'):
        raise UserError(f'--step-timeout {seconds:g}: must be a number of seconds, 0 for no limit')
    return seconds or None
