"""Transformers on images in JAX: pure-function Flax models, one trainer."""

__version__ = '0.1.0'
