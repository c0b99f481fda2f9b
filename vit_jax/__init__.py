"""Transformers on images in JAX: pure-function Flax models, one trainer.

`vit_jax.load(path)` makes a model of a checkpoint: see `vit_jax.interop.load.load`.
`vit_jax.train(config, workdir)` trains: see `vit_jax.trainer.api.train`.
"""

import importlib

__version__ = '0.1.0'

# What the package offers, and the modules that have it: the package alone imports nothing heavy.
_FOUND_IN = {'load': 'vit_jax.interop.load', 'train': 'vit_jax.trainer.api'}


def __getattr__(name: str):
    if name in _FOUND_IN:
        return getattr(importlib.import_module(_FOUND_IN[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
