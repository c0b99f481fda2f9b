"""The SkyPilot task of a managed job on Cloud TPUs, which is restarted after preemption."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, command
from vit_jax.launch.cloud_tpu import MOUNT, CloudJob, yaml_text

NAME = re.compile(r'[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyJob(CloudJob):
    """A job of SkyPilot.

    Attributes:
      extras: of the package that the command needs besides `tpu`.
      region, zone: any if empty.
      mounts: buckets, as `gs://BUCKET`, by their folders on the machines.
    """

    launcher = 'sky'

    extras: Sequence[str] = ()
    region: str = ''
    zone: str = ''
    mounts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def task(job: SkyJob) -> dict[str, Any]:
    """The fields of the task, see docs.skypilot.co/en/latest/reference/yaml-spec.html.

    Raises:
      UserError: for an invalid name, an unknown type of TPU, data that cannot be reached, or
        results that would be lost.
    """
    if not NAME.fullmatch(job.name):
        raise UserError(
            f'launch sky: --job-name {job.name!r}: must be letters, digits, -, _ and ., and begin '
            'with a letter'
        )
    # SkyPilot inserts these into shell commands without quoting.
    job.check_command(MOUNT)
    cloud_tpu.check_locations('sky', {'--region': job.region, '--zone': job.zone})
    cloud_tpu.check_mounts('sky', job.mounts, ('gs', 's3'))
    words = command.for_processes(job.words, cloud_tpu.hosts(job.tpu))
    mounts = {path: {'source': source, 'mode': 'MOUNT'} for path, source in job.mounts.items()}
    return {
        'name': job.name,
        'workdir': '.',
        'resources': {
            'infra': '/'.join(['gcp', job.region or '*', job.zone or '*']),
            'accelerators': f'tpu-{job.tpu.removeprefix("tpu-")}',
            'accelerator_args': {'runtime_version': cloud_tpu.runtime(job.tpu)},
            'use_spot': job.spot,
            'job_recovery': {
                'strategy': 'EAGER_NEXT_REGION',
                'max_restarts_on_errors': job.restarts,
                'recover_on_exit_codes': [EXIT_PREEMPTED],
            },
        },
        'envs': {**cloud_tpu.ENVIRON, **job.env},
        **({'file_mounts': mounts} if mounts else {}),
        'setup': cloud_tpu.setup(job.extras, database=job.words[0] == 'sweep'),
        'run': shlex.join(['.venv/bin/python', '-m', 'vit_jax', *words]) + '\n',
    }


def text(job: SkyJob) -> str:
    """The task as YAML; raises UserError as `task`."""
    return yaml_text(task(job))
