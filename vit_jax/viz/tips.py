"""Visualization of TIPS's predictions, as of SigLIP's."""

from vit_jax.viz.siglip import Viz as Viz
