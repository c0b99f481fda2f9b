"""Cloud TPUs: types of slices, their machines, and the setup of a machine."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from vit_jax.errors import UserError, nearest
from vit_jax.launch import command

# The port that is open between the machines of every slice.
ENVIRON = {'JAX_COORDINATOR_PORT': '8476', 'PYTHONUNBUFFERED': '1'}


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of Cloud TPUs.

    Attributes:
      runtime: The image of its machines for JAX (cloud.google.com/tpu/docs/runtimes); '' if there
        are none (TPU7x: Compute Engine and GKE).
      single: The largest size, in units of type names, that is one machine.
      step: The size of one machine of a larger slice.
      sizes: Sizes of the available slices (cloud.google.com/tpu/docs).
      gke: Its name in node labels (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).
      cores: Cores per chip, as counted in type names.
    """

    runtime: str
    single: int
    step: int
    sizes: Collection[int]
    gke: str = ''
    cores: int = 1


# Slices of v4 and v5p are boxes of any lengths, made of machines of 2 x 2 chips, 8 cores.
_LITE = (1, 4, 8, 16, 32, 64, 128, 256)
GENERATIONS = {
    'v2': Generation('tpu-ubuntu2204-base', 8, 8, (8, 32, 128, 256, 512)),
    'v3': Generation('tpu-ubuntu2204-base', 8, 8, (8, 32, 64, 128, 256, 512, 1024, 2048)),
    'v4': Generation('tpu-ubuntu2204-base', 8, 8, range(8, 8192 + 1, 8), 'tpu-v4-podslice', 2),
    'v5litepod': Generation('v2-alpha-tpuv5-lite', 8, 4, _LITE, 'tpu-v5-lite-podslice'),
    'v5p': Generation('v2-alpha-tpuv5', 8, 8, range(8, 12288 + 1, 8), 'tpu-v5p-slice', 2),
    'v6e': Generation('v2-alpha-tpuv6e', 8, 4, _LITE, 'tpu-v6e-slice'),
    'tpu7x': Generation('', 8, 8, range(8, 18432 + 1, 8), 'tpu7x', 2),
}
# Their slices cannot work together over the data-center network.
SINGLE_SLICE = ('v2', 'v3')
VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
LOCATION = re.compile(r'[a-z0-9-]*')
RESOURCE_NAME = re.compile(r'[a-z]([-a-z0-9]{0,38}[a-z0-9])?')
# The Python of the images is older than 3.11.
SETUP = """\
export PATH="$HOME/.local/bin:$PATH"
command -v uv || python3 -m pip install --user --quiet 'uv>=0.9'
uv venv --python 3.12 --allow-existing .venv
uv pip install --python .venv -c constraints.txt -e '.[{extras}]'
"""


@dataclasses.dataclass(frozen=True)
class CloudJob:
    """A command to run on Cloud TPUs, with its resources.

    Attributes:
      args: Command, such as `['train', '--config', ...]`.
      name: Name of the job.
      tpu: Type of a slice, such as `v5litepod-16`.
      spot: Whether it may be preempted, at a lower price.
      restarts: Limit on restarts after failures, not counting preemptions.
      env: Environment variables of the command.
    """

    launcher: ClassVar[str]

    args: Sequence[str]
    name: str
    tpu: str
    _: dataclasses.KW_ONLY
    spot: bool = False
    restarts: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_command(self, hint: str) -> None:
        """Check the command's variables, and where its data and results are.

        Raises:
          UserError: for invalid variables, data in a bucket (the message ends with the hint), or
            results that would be deleted with the machine.
        """
        check_variables(self.launcher, self.env)
        check_data(self.launcher, self.env, hint)
        command.require_bucket(self.launcher, self.args)


def parse_type(tpu: str) -> tuple[str, int]:
    """Parse generation and size of a type such as `v5litepod-8`.

    Raises:
      UserError: for any other name.
    """
    match = re.fullmatch(r'(?:tpu-)?(.+)-([1-9][0-9]*)', tpu)
    if match is None:
        raise UserError(f'launch: --tpu {tpu!r}: must be GENERATION-SIZE, such as v5litepod-8')
    if match[1] not in GENERATIONS:
        raise UserError('launch: --tpu: ' + nearest('TPU generation', match[1], GENERATIONS))
    generation, size = GENERATIONS[match[1]], int(match[2])
    if size not in generation.sizes:
        nearest_sizes = sorted(
            sorted(generation.sizes, key=lambda neighbor: abs(neighbor - size))[:2]
        )
        raise UserError(
            f'launch: --tpu {tpu}: there is no such slice; the nearest are '
            + ' and '.join(f'{match[1]}-{neighbor}' for neighbor in nearest_sizes)
        )
    return match[1], size


def accelerator_type(tpu: str) -> str:
    """Return the type of a slice that is named as for `preflight`: `v5e-8`, `v5e:4x4`, `v4-32`.

    Raises:
      UserError: The name is of several slices.
    """
    if match := re.fullmatch(r'(\d+)x(\D.*)', tpu):
        raise UserError(
            f'launch: --tpu {tpu}: give one slice: --tpu {match[2]} --slices {match[1]}'
        )
    name, colon, shape = re.sub('^(tpu-)?v5e(?=[-:])', r'\1v5litepod', tpu).partition(':')
    if not colon or name not in GENERATIONS or not re.fullmatch(r'\d+(x\d+)*', shape):
        return f'{name}{colon}{shape}'
    chips = math.prod(map(int, shape.split('x')))
    return f'{name}-{chips * GENERATIONS[name].cores}'


def hosts(tpu: str) -> int:
    """Return the number of machines of a slice; each runs one process."""
    name, size = parse_type(tpu)
    generation = GENERATIONS[name]
    return 1 if size <= generation.single else size // generation.step


def runtime(tpu: str) -> str:
    """Return the image of the slice's machines; UserError if only GKE offers them."""
    if not (image := GENERATIONS[parse_type(tpu)[0]].runtime):
        raise UserError(f'launch: --tpu {tpu}: not in the Cloud TPU API; use launch gke')
    return image


def chips(tpu: str) -> int:
    """Return the number of chips of a slice."""
    name, size = parse_type(tpu)
    return size // GENERATIONS[name].cores


def topology(tpu: str) -> str:
    """Return the most cubic shape of a slice, such as `4x4`; '' if sides are not powers of 2."""
    name, _ = parse_type(tpu)
    doublings, dims = chips(tpu).bit_length() - 1, 2 if GENERATIONS[name].cores == 1 else 3
    if 2**doublings != chips(tpu):
        return ''
    sides = [2 ** ((doublings + i) // dims) for i in range(dims)]
    return 'x'.join(map(str, sides if sides[0] > 1 else sorted(sides, reverse=True)))


def check_slices(launcher: str, tpu: str, slices: int, min_slices: int) -> None:
    """Check that several slices of a type can work together.

    Args:
      launcher: Name of the launcher, for the message.
      tpu: Type of the slices.
      slices: Number of slices.
      min_slices: Smallest number that the job accepts.

    Raises:
      UserError: if they cannot.
    """
    if slices > 1 and (name := parse_type(tpu)[0]) in SINGLE_SLICE:
        raise UserError(
            f'launch {launcher}: --slices {slices}: slices of {name} cannot work together; those '
            'of v4 and later can'
        )
    if min_slices > slices:
        raise UserError(
            f'launch {launcher}: --min-slices {min_slices} is more than --slices {slices}; give at '
            f'most {slices}'
        )


def setup(extras: Iterable[str], database: bool) -> str:
    """Return the commands that install the package from the copied repository.

    Args:
      extras: Extras of the package that the command needs in addition to `tpu`.
      database: Whether machines share the study of a sweep.
    """
    all_extras = {*extras} | ({'postgres'} if database else set())
    return SETUP.format(extras=','.join(['tpu', *sorted(all_extras)]))


def check_variables(launcher: str, names: Iterable[str]) -> None:
    """Raise UserError unless all are names of environment variables."""
    for name in names:
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f'launch {launcher}: --env {name!r}: must be NAME=VALUE, and NAME letters, digits '
                'and _, no digit first'
            )


def check_locations(launcher: str, locations: Mapping[str, str]) -> None:
    """Raise UserError unless the value of each flag is a name of a region, zone or project."""
    for flag, place in locations.items():
        if not LOCATION.fullmatch(place):
            raise UserError(
                f'launch {launcher}: {flag} {place!r}: must be a name such as us-central1'
            )


def check_resource_name(launcher: str, flag: str, name: str) -> None:
    """Raise UserError unless Google Cloud and Kubernetes accept it as a resource name."""
    if not RESOURCE_NAME.fullmatch(name):
        raise UserError(
            f'launch {launcher}: {flag} {name!r}: must be at most 40 lower-case letters, digits '
            'and -, and begin with a letter'
        )


def check_data(launcher: str, env: Mapping[str, str], hint: str) -> None:
    """Raise UserError, with a hint, if TFDS would look for data in a bucket."""
    if '://' in (folder := env.get('TFDS_DATA_DIR', '')):
        raise UserError(
            f'launch {launcher}: TFDS_DATA_DIR={folder}: data must be in a folder; {hint}'
        )
