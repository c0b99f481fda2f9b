"""Visualization of distilled classifiers: as that of `classify`."""

from vit_jax.viz.classify import Viz as Viz
