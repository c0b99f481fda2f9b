"""Statistics of a model's patches, which standardize them as targets (`vit_jax.ops.phi_s`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.inference import embed
from vit_jax.ops import phi_s


def estimate(
    embedder: embed.Embedder, advance: Callable[[int], object] = lambda count: None
) -> tuple[dict[str, np.ndarray], dict[int, UserError]]:
    """Compute the statistics of PHI-S over the patches of all inputs.

    Args:
      embedder: Model and images, which computes only patches.
      advance: Called after each batch with the number of its images.

    Returns:
      The arrays of a file of statistics, and the errors of the images left out.

    Raises:
      UserError: if no image can be read, or the patches do not vary.
    """
    moments = phi_s.Moments()
    left_out: dict[int, UserError] = {}
    for start in range(0, len(embedder.inputs), embedder.batch_size):
        stop = min(start + embedder.batch_size, len(embedder.inputs))
        rows = embedder.rows(range(start, stop), advance)
        left_out |= rows.left_out
        for patches in rows.features.values():
            moments.add(patches)
    if not moments.count:
        raise next(iter(left_out.values()))
    return phi_s.standardization(moments), left_out
