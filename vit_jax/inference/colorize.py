"""Colorization of photographs by a chain of runs: coarse color samples, then upsamplers.

Kumar et al., 2021, arXiv:2102.04432, figure 2.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.inference.images import photo_reader
from vit_jax.inference.predict import predictor
from vit_jax.interop.trained import TrainedModel
from vit_jax.viz.photo import Photo


@dataclasses.dataclass(frozen=True)
class ColorizedPhoto:
    """A colorized photograph.

    Attributes:
      photo: Photo as the last run of the chain sees it.
      samples: Samples of the same size as `photo.image`.
      bits_per_dim: Bits per dimension of each sample's coarse colors.
    """

    photo: Photo
    samples: UInt8[np.ndarray, 'S H W 3']
    bits_per_dim: Float[np.ndarray, 'S']


def colorizer(
    core: TrainedModel, upsamplers: Sequence[TrainedModel], seed: int = 0
) -> Callable[[str | pathlib.Path], ColorizedPhoto]:
    """Return a function that colorizes a file of any size and ignores its own colors.

    Args:
      core: A run of the task `coltran`.
      upsamplers: Runs of the task `coltran_upsampler`, each fed by the one before.
      seed: Seed of the samples, which depend only on it and the file.

    Raises:
      UserError: for runs of different tasks, or if their image sizes do not match.
    """
    check_chain(core, upsamplers)
    readers = [photo_reader(run) for run in (core, *upsamplers)]
    draw, *refine = [predictor(run, seed) for run in (core, *upsamplers)]

    def colorize(path: str | pathlib.Path) -> ColorizedPhoto:
        photo = readers[0].read(path)
        coarse_samples = draw(photo.fields, photo.number)
        samples = coarse_samples['samples']
        for reader, upsample in zip(readers[1:], refine, strict=True):
            photo = reader.read(path)
            inputs = [{**photo.fields, 'coarse': sample} for sample in samples]
            samples = np.stack([upsample(coarse, photo.number)['image'] for coarse in inputs])
        return ColorizedPhoto(photo, samples, coarse_samples['bits_per_dim'])

    return colorize


def check_chain(core: TrainedModel, upsamplers: Sequence[TrainedModel]) -> None:
    """Raise UserError unless each run takes the output of the one before."""
    check_task(core, 'coltran', '--workdir')
    previous = core
    for run in upsamplers:
        check_task(run, 'coltran_upsampler', '--upsampler')
        assert previous.image_size is not None
        check_size(run, previous.image_size, str(previous.path))
        previous = run


def check_size(run: TrainedModel, size: Sequence[int], maker: str) -> None:
    """Raise UserError unless an upsampler takes images of size `size`, [H W]."""
    assert run.image_size is not None
    input_size = tuple(side // run.task.factor for side in run.image_size)
    if input_size != tuple(size):
        raise UserError(
            f'{run.path} takes images of {_pixels(input_size)} pixels, but {maker} makes '
            f'{_pixels(size)}'
        )


def check_task(run: TrainedModel, name: str, flag: str) -> None:
    """Raise UserError unless the run has this task."""
    if run.settings.task.name != name:
        raise UserError(
            f'{flag} {str(run.path)!r}: the run must have the task {name!r}, not '
            f'{run.settings.task.name!r}; for other runs use predict'
        )


def _pixels(size: Sequence[int]) -> str:
    return ' x '.join(map(str, reversed(size)))
