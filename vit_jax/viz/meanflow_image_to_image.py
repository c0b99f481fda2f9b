"""Visualization of images from images in a few steps, as in many."""

from vit_jax.viz.image_to_image import Viz as Viz
