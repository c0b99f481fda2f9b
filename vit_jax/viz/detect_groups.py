"""Visualization of detection with a sigmoid for each class."""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float
from vit_jax.viz import detect


class Viz(detect.Viz):
    """Show boxes with names and scores."""

    threshold = 0.5

    def class_probs(self, logits: Float[np.ndarray, 'Q C']) -> Float[np.ndarray, 'Q C']:
        """Compute the probability of each class of a query."""
        probs: np.ndarray = 1 / (1 + np.exp(-logits))
        return probs
