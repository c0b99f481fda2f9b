"""Visualization of images from images in a few steps, as of those in many."""

from vit_jax.viz import image_to_image


class Viz(image_to_image.Viz):
    """Samples beside what is given and the original."""
