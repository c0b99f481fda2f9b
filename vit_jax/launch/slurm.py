"""Sbatch script of a job.

On a stop signal, a job saves its state and exits with code 75; the script then requeues it under
the same number, and it continues. This needs no accounting database: failures are counted in a
file next to the output.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import command

# Variables of jobs and steps (sbatch(1), srun(1)), except those that select the cluster.
_OF_JOBS = re.compile(
    r'SLURMD?_(?!CONF$|CONF_SERVER$|CLUSTERS$|JWT$)|SRUN_|SBATCH_(CPU|MEM)_BIND'
    r'|OMPI_(COMM_WORLD_|MCA_orte_)|PMIX?_|PRTE_'
)
_DEVICES = ('CUDA_VISIBLE_DEVICES', 'GPU_DEVICE_ORDINAL', 'ROCR_VISIBLE_DEVICES')


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A command to run on a cluster, with its resources.

    Attributes:
      args: The command, such as `['train', '--config', ...]`.
      name: Name of the job.
      nodes: Number of nodes.
      gpus: GPUs of each node, with one process each; one process per node without GPUs.
      array: Number of jobs with the same command, which share a sweep's trials; 0 for one job.
      partition: The cluster's default if empty.
      time: The limit, such as `12:00:00`; the partition's if empty.
      grace: Seconds between the stop signal and the limit.
      restarts: Limit on restarts after failures; those at the time limit do not count.
      cpus: CPUs of each process; the cluster's default, mostly one, if 0.
      memory: Memory of each core, such as `4G`; the cluster's default, often 1 GB, if empty.
      options: More options of sbatch, such as `account=vision`.
      python: The interpreter.
    """

    args: Sequence[str]
    name: str
    nodes: int = 1
    gpus: int = 0
    array: int = 0
    partition: str = ''
    time: str = ''
    grace: int = 120
    restarts: int = 3
    cpus: int = 4
    memory: str = '4G'
    options: Sequence[str] = ()
    python: str = 'python'


BODY = """\
# Slurm signals the processes, not this shell, unless it ends the job itself.
ended=
trap 'ended=1' TERM
export PYTHONUNBUFFERED=1
# Of an allocation that the job was submitted from.
unset "${{!SLURM_CPU_BIND@}}" "${{!SLURM_MEM_BIND@}}"
# srun does not inherit it.
[ -n "${{SLURM_CPUS_PER_TASK:-}}" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun --kill-on-bad-exit=0 {command}
code=$?

# The last job of an array has the number of the whole array.
job=$SLURM_JOB_ID
[ -n "${{SLURM_ARRAY_TASK_ID:-}}" ] && job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
failures=.vit-jax-$job.failures  # a line each
again() {{
  [ -z "$ended" ] && scontrol requeue "$job"
}}
failed_too_often() {{
  ! echo "$code" >> "$failures" || [ "$(wc -l < "$failures")" -gt {restarts} ]
}}
case $code in
  0 | 2 | 3) rm -f "$failures" ;;  # done, or what would only be repeated
  {preempted}) again ;;  # stopped with the state saved
  *) if failed_too_often; then rm -f "$failures"; else again; fi ;;
esac
exit $code
"""


def script(job: SlurmJob) -> str:
    """Return the text of the sbatch script.

    Raises:
      UserError: if the command cannot run with these resources.
    """
    if job.array and tuple(job.args[:2]) != ('sweep', 'work'):
        raise UserError(
            f'launch slurm: --array starts the same command {job.array} times, which only '
            f'the workers of a sweep can share: -- sweep work NAME'
        )
    args = command.for_processes(job.args, job.nodes * max(job.gpus, 1))
    run = shlex.join([job.python, '-m', 'vit_jax', *args])
    body = BODY.format(command=run, preempted=EXIT_PREEMPTED, restarts=job.restarts)
    lines = [directive(option) for option in (*_options(job), *job.options)]
    check_grace(job.grace, job.time)
    return '\n'.join(['#!/bin/bash', *lines, '', body])


def submit(script: str) -> str:
    """Submit an sbatch script and return the number of the job.

    Raises:
      UserError: without sbatch, or if it refuses.
    """
    hint = 'run this on a login node of the cluster, or with --dry-run'
    printed = command.submit(['sbatch', '--parsable'], script, hint, outside_allocation(os.environ))
    return printed.strip().partition(';')[0]  # the name of the cluster may follow


def outside_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that Slurm and MPI set for a job or step.

    sbatch passes its environment on: the new job would get the CPU binding, the GPUs and the
    process numbers of the allocation that it is submitted from.
    """
    inherited = 'SLURM_JOB_ID' in environ
    return {
        name: value
        for name, value in environ.items()
        if not (_OF_JOBS.match(name) or (inherited and name in _DEVICES))
    }


def _options(job: SlurmJob) -> list[str]:
    overridden = {option.removeprefix('--').partition('=')[0] for option in job.options}
    options = {
        'job-name': job.name,
        'nodes': job.nodes,
        'ntasks-per-node': max(job.gpus, 1),
        'cpus-per-task': '' if overridden & {'cpus-per-task', 'cpus-per-gpu'} else job.cpus,
        'mem-per-cpu': '' if overridden & {'mem', 'mem-per-cpu', 'mem-per-gpu'} else job.memory,
        'gpus-per-node': job.gpus,
        'array': f'1-{job.array}' if job.array else '',
        'partition': job.partition,
        'time': job.time,
        'output': '%x-%A_%a.out' if job.array else '%x-%j.out',
        'open-mode': 'append',  # one file, however often the job is started again
        'signal': f'TERM@{job.grace}',
    }
    texts = [f'{name}={shlex.quote(str(value))}' for name, value in options.items() if value]
    return [*texts, 'requeue']


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
LONGEST_GRACE = 65535  # seconds that --signal accepts


def directive(option: str) -> str:
    """Return the script line for an option such as `account=vision`, quoted for a shell.

    Raises:
      UserError: for text that is not an option, or a value that Slurm does not accept.
    """
    if not option.isprintable():
        raise UserError(f'launch slurm: option {option!r} of sbatch: must be one line')
    try:
        parts = shlex.split(option)
    except ValueError:
        parts = []
    if len(parts) != 1 or not OPTION.fullmatch(parts[0]):
        raise UserError(
            f'launch slurm: option {option!r} of sbatch: must be NAME or NAME=VALUE, with quotes '
            "around spaces, such as comment='two words'"
        )
    name, _, value = parts[0].removeprefix('--').partition('=')
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
    limit = limit_seconds(time)
    if limit and grace >= limit:
        raise UserError(
            f'launch slurm: --grace {grace}: must be less than the limit of {limit} seconds '
            f'(--time {time})'
        )


def limit_seconds(time: str) -> int:
    """Convert a time limit such as `1-12:00:00` to seconds; 0 without one."""
    days, dash, clock = time.rpartition('-')
    parts = clock.split(':')
    if not all(map(str.isdecimal, parts)):
        return 0
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    return 86400 * int(days or 0) + seconds
