"""The SkyPilot task of a managed job on Cloud TPUs, which is restarted after preemption."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, command, names

NAME = re.compile(r'[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?')
MOUNT = 'give --mount /data=gs://BUCKET --env TFDS_DATA_DIR=/data/FOLDER'


@dataclasses.dataclass(frozen=True)
class SkyJob:
    """A command to run on Cloud TPUs, with its resources.

    Attributes:
      words: the command, as `['train', '--config', ...]`.
      name: of the job.
      tpu: type of the slice, as `v5litepod-8`.
      extras: of the package that the command needs besides `tpu`, see `command.extras_of`.
      spot: whether it may be preempted, at a lower price.
      region, zone: any if empty.
      restarts: limit on restarts of a failed job; a preempted one is always restarted.
      env: environment variables of the command.
      mounts: buckets, as `gs://BUCKET`, by their folders on the machines.
    """

    words: Sequence[str]
    name: str
    tpu: str
    extras: Sequence[str] = ()
    spot: bool = False
    region: str = ''
    zone: str = ''
    restarts: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
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
    names.check_variables('sky', job.env)
    names.check_places('sky', {'--region': job.region, '--zone': job.zone})
    names.check_mounts('sky', job.mounts, ('gs', 's3'))
    names.check_data('sky', job.env, MOUNT)
    command.require_bucket('sky', job.words)
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
    return yaml.dump(task(job), Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """A dumper that writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = '|' if value.endswith('\n') else None
    return dumper.represent_scalar('tag:yaml.org,2002:str', value, style=style)


_Dumper.add_representer(str, _text)
