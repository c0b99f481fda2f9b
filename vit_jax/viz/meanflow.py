"""Visualization of generation in a few steps, as of generation in many."""

from vit_jax.viz import generate


class Viz(generate.Viz):
    """Samples beside an image of their class."""
