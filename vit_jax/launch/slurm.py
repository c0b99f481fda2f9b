"""The sbatch script of a job.

On a stop signal, a job saves its state and exits with code 75; the script then requeues it under
the same number, and it continues. This needs no accounting database: failures are counted in a
file next to the output.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import command, sbatch


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """A command to run on a cluster, with its resources.

    Attributes:
      words: the command, as `['train', '--config', ...]`.
      name: of the job.
      nodes: their number.
      gpus: of each node, with one process each; one process a node without any.
      array: number of jobs with the same command, which share a sweep's trials; 0 for one job.
      partition: the cluster's default if empty.
      time: the limit, as `12:00:00`; the partition's if empty.
      grace: seconds between the stop signal and the limit.
      restarts: limit on restarts after failures; those at the time limit do not count.
      cpus: of each process; the cluster's default, mostly one, if 0.
      options: more options of sbatch, as `account=vision`.
      python: the interpreter.
    """

    words: Sequence[str]
    name: str
    nodes: int = 1
    gpus: int = 0
    array: int = 0
    partition: str = ''
    time: str = ''
    grace: int = 120
    restarts: int = 3
    cpus: int = 0
    options: Sequence[str] = ()
    python: str = 'python'


BODY = """\
# Slurm signals the processes, not this shell, unless it ends the job itself.
ended=
trap 'ended=1' TERM
export PYTHONUNBUFFERED=1
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
    """The text of the sbatch script.

    Raises:
      UserError: if the command cannot run with these resources.
    """
    if job.array and tuple(job.words[:2]) != ('sweep', 'work'):
        raise UserError(
            f'launch slurm: --array starts the same command {job.array} times, which only '
            f'the workers of a sweep can share: -- sweep work NAME'
        )
    words = command.for_processes(job.words, job.nodes * max(job.gpus, 1))
    run = shlex.join([job.python, '-m', 'vit_jax', *words])
    body = BODY.format(command=run, preempted=EXIT_PREEMPTED, restarts=job.restarts)
    lines = [sbatch.directive(option) for option in (*_options(job), *job.options)]
    sbatch.check_grace(job.grace, job.time)
    return '\n'.join(['#!/bin/bash', *lines, '', body])


def _options(job: SlurmJob) -> list[str]:
    options = {
        'job-name': job.name,
        'nodes': job.nodes,
        'ntasks-per-node': max(job.gpus, 1),
        'cpus-per-task': job.cpus,
        'gpus-per-node': job.gpus,
        'array': f'1-{job.array}' if job.array else '',
        'partition': job.partition,
        'time': job.time,
        'output': '%x-%A_%a.out' if job.array else '%x-%j.out',
        'open-mode': 'append',  # one file, however often the job is started again
        'signal': f'TERM@{job.grace}',
    }
    given = [f'{name}={shlex.quote(str(value))}' for name, value in options.items() if value]
    return [*given, 'requeue']
