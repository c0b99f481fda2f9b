"""Visualization of classes of pixels, as of the task `segment`."""

from __future__ import annotations

from vit_jax.viz import segment


class Viz(segment.Viz):
    """Show the classes of pixels in colors."""
