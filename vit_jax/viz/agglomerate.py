"""Visualization of agglomerated features, as for `lejepa`."""

from vit_jax.viz.lejepa import Viz as Viz
