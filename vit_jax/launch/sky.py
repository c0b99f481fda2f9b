"""The SkyPilot task of a managed job on Cloud TPUs, which is restarted after preemption."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from vit_jax.errors import EXIT_PREEMPTED, UserError, nearest
from vit_jax.launch import command

NAME = re.compile(r'[A-Za-z]([-_.A-Za-z0-9]*[A-Za-z0-9])?')
# SkyPilot inserts these into shell commands without quoting.
VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
BUCKET = re.compile(r'(gs|s3)://[a-z0-9][-_.a-z0-9]*/?')
FOLDER = re.compile(r'(/(?!\.\.?(/|$))[-_.A-Za-z0-9]+)+/?')
PLACE = re.compile(r'[a-z0-9-]*')


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of Cloud TPUs.

    Attributes:
      runtime: the image of its machines for JAX (cloud.google.com/tpu/docs/runtimes).
      single: the largest size, in units of type names, that is one machine.
      step: the size of one machine of a larger slice.
      sizes: of the available slices (cloud.google.com/tpu/docs).
    """

    runtime: str
    single: int
    step: int
    sizes: Collection[int]


# Slices of v4 and v5p are boxes of any lengths, made of machines of 2 x 2 chips, 8 cores.
_LITE = (1, 4, 8, 16, 32, 64, 128, 256)
GENERATIONS = {
    'v2': Generation('tpu-ubuntu2204-base', 8, 8, (8, 32, 128, 256, 512)),
    'v3': Generation('tpu-ubuntu2204-base', 8, 8, (8, 32, 64, 128, 256, 512, 1024, 2048)),
    'v4': Generation('tpu-ubuntu2204-base', 8, 8, range(8, 8192 + 1, 8)),
    'v5litepod': Generation('v2-alpha-tpuv5-lite', 8, 4, _LITE),
    'v5p': Generation('v2-alpha-tpuv5', 8, 8, range(8, 12288 + 1, 8)),
    'v6e': Generation('v2-alpha-tpuv6e', 8, 4, _LITE),
}
# The Python of the images is older than 3.11.
SETUP = """\
export PATH="$HOME/.local/bin:$PATH"
command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh
uv venv --python 3.12 --allow-existing .venv
uv pip install --python .venv -c constraints.txt -e '.[{extras}]'
"""


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


def parse(tpu: str) -> tuple[Generation, int]:
    """Generation and size of a type such as `v5litepod-8`.

    Raises:
      UserError: for any other name.
    """
    match = re.fullmatch(r'(?:tpu-)?(.+)-([1-9][0-9]*)', tpu)
    if match is None:
        raise UserError(f'launch sky: --tpu {tpu!r}: must be GENERATION-SIZE, as v5litepod-8')
    if match[1] not in GENERATIONS:
        raise UserError('launch sky: --tpu: ' + nearest('TPU generation', match[1], GENERATIONS))
    generation, size = GENERATIONS[match[1]], int(match[2])
    if size not in generation.sizes:
        near = sorted(sorted(generation.sizes, key=lambda other: abs(other - size))[:2])
        raise UserError(
            f'launch sky: --tpu {tpu}: there is no such slice; the nearest are '
            + ' and '.join(f'{match[1]}-{other}' for other in near)
        )
    return generation, size


def hosts(tpu: str) -> int:
    """The number of machines of a slice; each runs one process."""
    generation, size = parse(tpu)
    return 1 if size <= generation.single else size // generation.step


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
    _check_names(job)
    _check_places(job)
    command.require_bucket(job.words)
    words = command.for_processes(job.words, hosts(job.tpu))
    mounts = {path: {'source': source, 'mode': 'MOUNT'} for path, source in job.mounts.items()}
    return {
        'name': job.name,
        'workdir': '.',
        'resources': {
            'infra': '/'.join(['gcp', job.region or '*', job.zone or '*']),
            'accelerators': f'tpu-{job.tpu.removeprefix("tpu-")}',
            'accelerator_args': {'runtime_version': parse(job.tpu)[0].runtime},
            'use_spot': job.spot,
            'job_recovery': {
                'strategy': 'EAGER_NEXT_REGION',
                'max_restarts_on_errors': job.restarts,
                'recover_on_exit_codes': [EXIT_PREEMPTED],
            },
        },
        # The port that is open between the machines of every slice.
        'envs': {'JAX_COORDINATOR_PORT': '8476', 'PYTHONUNBUFFERED': '1', **job.env},
        **({'file_mounts': mounts} if mounts else {}),
        'setup': SETUP.format(extras=','.join(_extras(job))),
        'run': shlex.join(['.venv/bin/python', '-m', 'vit_jax', *words]) + '\n',
    }


def _extras(job: SkyJob) -> list[str]:
    """The extras to install; machines share the study of a sweep in a database."""
    database = {'postgres'} if job.words[0] == 'sweep' else set()
    return ['tpu', *sorted({*job.extras} | database)]


def _check_names(job: SkyJob) -> None:
    for name in job.env:
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f'launch sky: --env {name!r}: must be NAME=VALUE, and NAME letters, digits and _, '
                'no digit first'
            )
    for flag, place in (('--region', job.region), ('--zone', job.zone)):
        if not PLACE.fullmatch(place):
            raise UserError(f'launch sky: {flag} {place!r}: must be a name, as us-central1')


def _check_places(job: SkyJob) -> None:
    for path, source in job.mounts.items():
        if not (FOLDER.fullmatch(path) and BUCKET.fullmatch(source)):
            raise UserError(
                f'launch sky: --mount {f"{path}={source}"!r}: must be /FOLDER=gs://BUCKET, '
                'of a whole bucket; letters, digits, -, _ and . may stand in FOLDER'
            )
    if '://' in (folder := job.env.get('TFDS_DATA_DIR', '')):
        raise UserError(
            f'launch sky: TFDS_DATA_DIR={folder}: data are read from folders; give --mount '
            '/data=gs://BUCKET --env TFDS_DATA_DIR=/data/FOLDER'
        )


def text(job: SkyJob) -> str:
    """The task as YAML; raises UserError as `task`."""
    return yaml.dump(task(job), Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """A dumper that writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = '|' if value.endswith('\n') else None
    return dumper.represent_scalar('tag:yaml.org,2002:str', value, style=style)


_Dumper.add_representer(str, _text)
