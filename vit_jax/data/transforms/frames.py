"""Frames of a clip: an image may have axes before its [H, W, C], and all get the same transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from vit_jax.array_types import Shaped

T = TypeVar('T')
S = TypeVar('S')


def split(image: Shaped[np.ndarray, '*T H W C']) -> Shaped[np.ndarray, 'F H W C']:
    """The frames of an image, one of [H, W, C]."""
    return image.reshape(-1, *image.shape[-3:])


def alike(change: Callable[[S], T], frames: Sequence[S], *rng: np.random.Generator) -> list[T]:
    """Apply `change` to each frame; all draw the same from the generator, if there is one."""
    if len(frames) == 1:
        return [change(frames[0])]
    states = [one.bit_generator.state for one in rng]
    made = []
    for frame in frames:
        for one, state in zip(rng, states, strict=True):
            one.bit_generator.state = state
        made.append(change(frame))
    return made


def each(
    change: Callable[..., np.ndarray],
    image: Shaped[np.ndarray, '*T H W C'],
    *rng: np.random.Generator,
) -> Shaped[np.ndarray, '*T H2 W2 C2']:
    """Lift a function of (frame, *rng) to images of several frames, with the same draws for all."""
    if image.ndim == 3:
        return change(image, *rng)
    made = np.stack(alike(lambda frame: change(frame, *rng), list(split(image)), *rng))
    return made.reshape(*image.shape[:-3], *made.shape[1:])
