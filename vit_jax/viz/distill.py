"""Visualization of distilled classifiers, as for `classify`."""

from vit_jax.viz.classify import Viz as Viz
