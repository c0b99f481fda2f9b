"""Cloud TPUs: types of slices and their machines, and what a machine needs to run a command."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

from vit_jax.errors import UserError, nearest

VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
PLACE = re.compile(r'[a-z0-9-]*')
# The port that is open between the machines of every slice.
ENVIRON = {'JAX_COORDINATOR_PORT': '8476', 'PYTHONUNBUFFERED': '1'}


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
ONLY_GKE = 'tpu7x'
# Slices of these cannot work together over the network of the data center.
ALONE = ('v2', 'v3')
# The Python of the images is older than 3.11.
SETUP = """\
export PATH="$HOME/.local/bin:$PATH"
command -v uv || curl -LsSf https://astral.sh/uv/install.sh | sh
uv venv --python 3.12 --allow-existing .venv
uv pip install --python .venv -c constraints.txt -e '.[{extras}]'
"""


def parse(tpu: str) -> tuple[str, int]:
    """Generation and size of a type such as `v5litepod-8`.

    Raises:
      UserError: for any other name.
    """
    match = re.fullmatch(r'(?:tpu-)?(.+)-([1-9][0-9]*)', tpu)
    if match is None:
        raise UserError(f'launch: --tpu {tpu!r}: must be GENERATION-SIZE, as v5litepod-8')
    if match[1] == ONLY_GKE:
        raise UserError(f'launch: --tpu {tpu}: TPU7x is available on GKE only: launch gke')
    if match[1] not in GENERATIONS:
        raise UserError('launch: --tpu: ' + nearest('TPU generation', match[1], GENERATIONS))
    generation, size = GENERATIONS[match[1]], int(match[2])
    if size not in generation.sizes:
        near = sorted(sorted(generation.sizes, key=lambda other: abs(other - size))[:2])
        raise UserError(
            f'launch: --tpu {tpu}: there is no such slice; the nearest are '
            + ' and '.join(f'{match[1]}-{other}' for other in near)
        )
    return match[1], size


def hosts(tpu: str) -> int:
    """The number of machines of a slice; each runs one process."""
    name, size = parse(tpu)
    generation = GENERATIONS[name]
    return 1 if size <= generation.single else size // generation.step


def runtime(tpu: str) -> str:
    """The image of the slice's machines."""
    return GENERATIONS[parse(tpu)[0]].runtime


def check_slices(launcher: str, tpu: str, slices: int, fewest: int) -> None:
    """Check that so many slices of a type can work together.

    Args:
      launcher: for the message.
      tpu: type of the slices.
      slices: their number.
      fewest: the number with which the job goes on if there are no more.

    Raises:
      UserError: if they cannot.
    """
    if slices > 1 and (name := parse(tpu)[0]) in ALONE:
        raise UserError(
            f'launch {launcher}: --slices {slices}: slices of {name} cannot work together; those '
            'of v4 and later can'
        )
    if fewest > slices:
        raise UserError(
            f'launch {launcher}: --min-slices {fewest} is more than --slices {slices}; give at '
            f'most {slices}'
        )


def setup(extras: Iterable[str], database: bool) -> str:
    """The commands that install the package from the copied repository.

    Args:
      extras: of the package that the command needs besides `tpu`, see `command.extras_of`.
      database: whether machines share the study of a sweep.
    """
    needed = {*extras} | ({'postgres'} if database else set())
    return SETUP.format(extras=','.join(['tpu', *sorted(needed)]))


def check_names(launcher: str, variables: Iterable[str], places: Iterable[tuple[str, str]]) -> None:
    """Check names that launchers insert into shell commands without quoting.

    Args:
      launcher: for the message.
      variables: names of environment variables.
      places: names of regions and zones, each after its flag.

    Raises:
      UserError: for a name that a shell could read otherwise.
    """
    for name in variables:
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f'launch {launcher}: --env {name!r}: must be NAME=VALUE, and NAME letters, digits '
                'and _, no digit first'
            )
    for flag, place in places:
        if not PLACE.fullmatch(place):
            raise UserError(f'launch {launcher}: {flag} {place!r}: must be a name, as us-central1')
