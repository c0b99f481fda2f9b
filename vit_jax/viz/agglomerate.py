"""Visualization of agglomerated features: as that of `lejepa`."""

from vit_jax.viz.lejepa import Viz as Viz
