"""Command line of each process of a job, and submission of jobs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from vit_jax import extras
from vit_jax.errors import UserError

SEVERAL = (('train',), ('sweep', 'work'))  # commands that several processes can share
WRITERS = ('train', 'sweep')  # commands whose results are in their --workdir
BUCKETS = ('gs://', 's3://')


def for_processes(args: Sequence[str], processes: int) -> list[str]:
    """Return the command line of each process of a job.

    Args:
      args: Arguments after `vit_jax`, such as `['train', '--config', ...]`.
      processes: Number of processes of the job.

    Raises:
      UserError: if the command runs in one process only.
    """
    if processes == 1 or '--distributed' in args:
        return list(args)
    if not any(tuple(args[: len(prefix)]) == prefix for prefix in SEVERAL):
        valid = ', '.join(' '.join(prefix) for prefix in SEVERAL)
        raise UserError(
            f'launch: {args[0]} runs in one process, and this would start {processes} '
            f'(several can share: {valid})'
        )
    return [*args, '--distributed']


def require_installed(needed: Sequence[str], feature: str) -> None:
    """Raise UserError for an extra that is missing here, since jobs use this installation."""
    for extra in needed:
        if not extras.is_installed(extra):
            raise extras.missing_error(feature, extra)


def require_bucket(launcher: str, args: Sequence[str]) -> None:
    """Check that the results of the command outlive its machine.

    Args:
      launcher: Name of the launcher, for the message.
      args: Arguments after `vit_jax`, such as `['train', '--config', ...]`.

    Raises:
      UserError: if its --workdir is a local folder.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    missing = '' if args[0] in WRITERS else None
    parser.add_argument('--workdir', nargs='?', const='', default=missing)
    workdir = parser.parse_known_args(list(args))[0].workdir
    if workdir is not None and not workdir.startswith(BUCKETS):
        raise UserError(
            f'launch {launcher}: the machine is deleted when the job ends or is preempted, and '
            f'{workdir or "its runs/"} with it: give a bucket, such as --workdir gs://BUCKET/RUN'
        )


def submit(args: Sequence[str], stdin: str, hint: str, environ: Mapping[str, str] = {}) -> str:
    """Run a program that submits a job and return what it prints.

    Args:
      args: Arguments of the command line.
      stdin: Standard input of the program.
      hint: What to do without the program.
      environ: Environment variables of the program; by default this process's.

    Raises:
      UserError: if it is not installed, or refuses the job.
    """
    environ = dict(environ or os.environ)
    if not sys.flags.safe_path:
        environ.pop('PYTHONSAFEPATH', None)  # set by this program; a job inherits the rest
    try:
        process = subprocess.run(
            args, input=stdin, capture_output=True, text=True, check=False, env=environ
        )
    except FileNotFoundError as e:
        raise UserError(f'launch: {args[0]} was not found; {hint}') from e
    if process.returncode:
        lines = (
            process.stderr.strip() or process.stdout.strip() or 'it gives no reason'
        ).splitlines()
        raise UserError(f'launch: {args[0]} refused: {lines[-1]}')
    return process.stdout
