"""Transformers on images in JAX: pure-function Flax models, one trainer.

`vit_jax.load(path)` makes a model of a checkpoint: see `vit_jax.interop.load.load`.
"""

from typing import Any

__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
    # The package alone imports nothing heavy.
    if name == 'load':
        from vit_jax.interop.load import load

        return load
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
