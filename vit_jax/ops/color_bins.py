"""Colors as classes: bins of a and b of CIE Lab, so that several colors can be likely at once.

Zhang et al., 2016, arXiv:1603.08511, section 2.2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int, Num
from vit_jax.ops import colors

SIZE = 10  # of a bin, in units of a and b
MARGIN = 13.5
NUM_BINS = 313
NEIGHBORS, SIGMA = 5, 5.0  # of the soft encoding
REBALANCE = 0.5  # lambda: the share of the uniform distribution in that of the colors
TEMPERATURE = 0.38


@functools.cache
def centers() -> Float[np.ndarray, 'Q 2']:
    """(a, b) of the middle of every bin, sorted.

    The bins are the multiples of 10 within 13.5 of a color of sRGB. The paper gives their number,
    313, but no rule; the margin is chosen to match it. Of the bins, 229 are themselves colors of
    sRGB at some lightness and 261 are the nearest to such a color; the others surround these, so
    that the soft encoding finds all its neighbors.
    """
    from scipy.spatial import KDTree

    steps = np.linspace(0, 1, 64)
    # In (a, b) the faces of the cube cover as much as the whole cube.
    cube = np.stack(np.meshgrid(steps, steps, [0.0, 1.0], indexing='ij'), axis=-1).reshape(-1, 3)
    faces = np.concatenate([np.roll(cube, shift, axis=1) for shift in range(3)])
    with jax.ensure_compile_time_eval():
        gamut = np.asarray(colors.rgb_to_lab(faces.astype(np.float32)))[:, 1:]
    ticks = np.arange(-130, 131, SIZE)
    grid = np.stack(np.meshgrid(ticks, ticks, indexing='ij'), axis=-1).reshape(-1, 2)
    found = grid[KDTree(gamut).query(grid)[0] <= MARGIN].astype(np.float32)
    found.flags.writeable = False
    return found


def _distances(ab: Float[colors.Values, '*B 2']) -> Float[Array, '*B Q']:
    """Squared distances to every bin."""
    middle = jnp.asarray(centers())
    a, b = (jnp.square(ab[..., i, None] - middle[:, i]) for i in range(2))
    return a + b


def nearest(ab: Float[colors.Values, '*B 2']) -> Int[Array, '*B']:
    """The index of the bin in which a color lies."""
    return jnp.argmin(_distances(ab), axis=-1)


def soft_encode(
    ab: Float[colors.Values, '*B 2'],
) -> tuple[Int[Array, '*B 5'], Float[Array, '*B 5']]:
    """The five nearest bins, the nearest first, and their weights, which sum to 1.

    The weights are Gaussian in the distance, with a deviation of 5.
    """
    closeness, bins = jax.lax.top_k(-_distances(ab), NEIGHBORS)
    # A caller's slice of the bins, merged with that of `top_k`, would make XLA sort all of them. A
    # barrier for both results at once aborts its compiler under `jax.pmap` on CPUs.
    bins = jax.lax.optimization_barrier(bins)
    return bins, jax.nn.softmax(closeness / (2 * SIGMA**2), axis=-1)


def annealed_mean(
    logits: Float[Array, '*B Q'], temperature: float = TEMPERATURE
) -> Float[Array, '*B 2']:
    """The mean color of the distribution at a temperature (equation 5).

    At 1 it is the mean, which is pale; toward 0 it becomes the most likely bin, which is patchy.
    """
    probs = jax.nn.softmax(logits / temperature, axis=-1)
    return jnp.stack([(probs * middle).sum(-1) for middle in centers().T], axis=-1)


def class_weights(counts: Num[np.ndarray, 'Q'], mix: float = REBALANCE) -> Float[np.ndarray, 'Q']:
    """The weight of each bin in the loss, larger for rare colors (equation 4).

    The shares of the bins are smoothed in (a, b) by a Gaussian with a deviation of 5 and mixed with
    the uniform distribution. The weights are their inverses, scaled so that the mean weight under
    the smoothed shares is 1.

    Args:
      counts: how often a color lies in each bin.
      mix: lambda, 0 for pure inverses, 1 for no rebalancing.
    """
    distances = np.square(centers()[:, None] - centers()[None]).sum(-1)
    kernel = np.exp(-distances / (2 * SIGMA**2))
    shares = kernel / kernel.sum(axis=0) @ (counts / counts.sum())
    weights = 1 / ((1 - mix) * shares + mix / len(shares))
    return (weights / (shares * weights).sum()).astype(np.float32)
