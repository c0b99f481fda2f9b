"""Visualization of generation in a few steps, as in many."""

from vit_jax.viz.generate import Viz as Viz
