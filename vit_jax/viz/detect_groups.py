"""Visualization of detection with a sigmoid for each class."""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float, Int
from vit_jax.viz import detect
from vit_jax.viz.photo import Context, Fields


class Viz(detect.Viz):
    """Show boxes with names and scores."""

    threshold = 0.5

    def class_probs(self, logits: Float[np.ndarray, 'Q C']) -> Float[np.ndarray, 'Q C']:
        """Compute the probability of each class of a query."""
        probs: np.ndarray = 1 / (1 + np.exp(-logits))
        return probs

    def drawn(self, prediction: Fields, context: Context) -> Int[np.ndarray, ' K']:
        """Return the predictions in the picture: the best class of each query, sorted by score."""
        shown = super().drawn(prediction, context)
        _, best = np.unique(prediction['queries'][shown], return_index=True)
        return shown[np.sort(best)]
