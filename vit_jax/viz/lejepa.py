"""Visualization of LeJEPA's features: patches colored by principal components."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.viz import dinov2
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(dinov2.Viz):
    """Show each image next to its patches, with the length of its feature as the row."""

    bar = None

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the length of the feature vector."""
        del photo, context
        return [{'feature_length': float(np.linalg.norm(prediction['features']))}]
