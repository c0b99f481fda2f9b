"""Visualization of generation: samples next to an image of their class, grids, trajectories."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.viz import base, batch
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo, add_sampling_flags, with_sampling_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 1.0  # inches of a sample in a grid


class Viz(base.Viz):
    """Show samples; their noise depends on the example's index, and is the same in all evaluations.

    A file has no class, so `predict` samples without one.
    """

    side = 1.2

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the number of samples and sampling options."""
        add = parser.add_argument
        add('--samples', type=int, metavar='N', help="samples per image (default: the task's, 1)")
        add_sampling_flags(parser)

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Apply the options of the flags to the task."""
        return with_sampling_flags(task, context.flags, 'samples')

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the mean and the standard deviation of each sample's bytes."""
        del photo, context
        return [
            {'sample': i, 'mean': float(sample.mean()), 'std': float(sample.std())}
            for i, sample in enumerate(prediction['samples'])
        ]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return the example, and samples of its class."""
        samples = prediction['samples']
        return [('image', photo.image), *((f'sample {i}', s) for i, s in enumerate(samples))]

    def caption(self, fields: Fields, context: Context) -> str:
        """Return the class of an example; empty if it has none."""
        if 'label' not in fields:
            return ''
        return class_name(int(fields['label']), context.class_names)


def class_name(label: int, names: Sequence[str]) -> str:
    """Return the number and the name of a class, if it has one; 'no class' for -1."""
    if label < 0:
        return 'no class'
    name = names[label] if label < len(names) else str(label)
    return f'class {label}' if name == str(label) else f'{label} {name}'


def draw_grid(
    samples: Sequence[Sequence[UInt8[np.ndarray, 'H W C']]], names: Sequence[str]
) -> Figure:
    """Draw rows of numbered samples.

    Args:
      samples: Samples of each row.
      names: Names of the rows, such as classes.
    """
    rows = [[(str(i), sample) for i, sample in enumerate(row)] for row in samples]
    return batch.draw_rows(rows, names, SIDE)


def draw_trajectories(
    frames: Sequence[UInt8[np.ndarray, 'K H W C']],
    samples: Sequence[UInt8[np.ndarray, 'H W C']],
    times: Sequence[float],
    names: Sequence[str],
) -> Figure:
    """Draw a row per sample: intermediate predictions, then the sample.

    Args:
      frames: Intermediate predictions of each sample.
      samples: Final samples.
      times: Times of the frames.
      names: Names of the samples.
    """
    rows = [
        [
            *((f't = {t:.2f}', frame) for t, frame in zip(times, frames_of_sample, strict=True)),
            ('t = 1', last),
        ]
        for frames_of_sample, last in zip(frames, samples, strict=True)
    ]
    return batch.draw_rows(rows, names, SIDE)
