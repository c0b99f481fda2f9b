"""Formats of the options of sbatch (slurm.schedmd.com/sbatch.html), checked before it is called."""

from __future__ import annotations

import re
import shlex

from vit_jax.errors import UserError

OPTION = re.compile(r'(--)?[a-z][a-z-]*(=.*)?')
_TIME = r'\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE'
_COUNT = r'0*[1-9]\d*'
_MEMORY = (r'\d+([KMGT]B?)?', 'a whole number of megabytes, or with a unit of K, M, G, T, as 64G')
_GPUS = (r'([\w.-]+:)?\d+', 'a number, as 4, or with the type of GPU, as a100:4')
_POSITIVE = (_COUNT, 'a whole number from 1 on')
FORMATS = {
    'time': (_TIME, 'minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES], as 12:00:00'),
    'mem': _MEMORY,
    'mem-per-cpu': _MEMORY,
    'mem-per-gpu': _MEMORY,
    'nodes': (rf'{_COUNT}(-{_COUNT})?', 'a whole number from 1 on'),
    'ntasks-per-node': _POSITIVE,
    'cpus-per-task': _POSITIVE,
    'cpus-per-gpu': _POSITIVE,
    'gpus': _GPUS,
    'gpus-per-node': _GPUS,
    'gpus-per-task': _GPUS,
    'partition': (r'[\w.-]+(,[\w.-]+)*', 'a name, or several with commas between them'),
    'job-name': (r'(?! )[^/]{1,200}', 'at most 200 characters, no / among them'),
}
LONGEST_GRACE = 65535  # seconds that --signal takes


def directive(option: str) -> str:
    """The line of a script for an option such as `account=vision`, quoted as for a shell.

    Raises:
      UserError: for what is no option, or a value that Slurm does not take.
    """
    if not option.isprintable():
        raise UserError(f'launch slurm: option {option!r} of sbatch: must be one line')
    try:
        words = shlex.split(option)
    except ValueError:
        words = []
    if len(words) != 1 or not OPTION.fullmatch(words[0]):
        raise UserError(
            f'launch slurm: option {option!r} of sbatch: must be NAME or NAME=VALUE, with quotes '
            "around spaces, as comment='two words'"
        )
    name, _, value = words[0].removeprefix('--').partition('=')
    pattern, format_ = FORMATS.get(name, ('.*', ''))
    if not re.fullmatch(pattern, value, re.ASCII | re.IGNORECASE):
        raise UserError(f'launch slurm: --{name} {value!r}: must be {format_}')
    return f'#SBATCH --{option.removeprefix("--")}'


def check_grace(grace: int, time: str) -> None:
    """Check that the stop signal, `grace` seconds before the limit `time`, can be sent.

    Raises:
      UserError: if it would come before the start of the job, or is too long for Slurm.
    """
    if grace > LONGEST_GRACE:
        raise UserError(f'launch slurm: --grace {grace}: must be at most {LONGEST_GRACE} seconds')
    limit = seconds(time)
    if limit and grace >= limit:
        raise UserError(
            f'launch slurm: --grace {grace}: the signal would come before the job starts, whose '
            f'limit is {limit} seconds (--time {time})'
        )


def seconds(time: str) -> int:
    """The seconds of a limit such as `1-12:00:00`; 0 if there is none."""
    days, dash, clock = time.rpartition('-')
    parts = clock.split(':')
    if not all(map(str.isdecimal, parts)):
        return 0
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    found = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return 86400 * int(days or 0) + found
