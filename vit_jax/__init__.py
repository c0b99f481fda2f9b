"""Transformers on images in JAX: pure-function Flax models, one trainer.

`vit_jax.train(config, workdir)` trains: see `vit_jax.trainer.api.train`.
`vit_jax.load(path)` loads a model and its weights: see `vit_jax.inference.load.load`.
`vit_jax.predict(path, images)` predicts for images: see `vit_jax.inference.predict.predict`.
`vit_jax.embed(path, images)` computes features: see `vit_jax.inference.embed.embed`.
`vit_jax.evaluate(path)` evaluates: see `vit_jax.trainer.api.evaluate`.
`vit_jax.to_nnx(model, variables)` makes a Flax NNX module: see `vit_jax.inference.nnx_module`.
"""

import importlib
import re

__version__ = '0.2.0.dev0'

# The public functions and their modules, imported on first use to keep `import vit_jax` fast.
_FOUND_IN = {
    'embed': 'vit_jax.inference.embed',
    'evaluate': 'vit_jax.trainer.api',
    'load': 'vit_jax.inference.load',
    'predict': 'vit_jax.inference.predict',
    'to_nnx': 'vit_jax.inference.nnx_module',
    'train': 'vit_jax.trainer.api',
}

__all__ = ['__version__', 'embed', 'evaluate', 'load', 'predict', 'to_nnx', 'train']


def __dir__() -> list[str]:
    """List public functions, imported or not, and the modules imported so far."""
    public = {name for name in globals() if not re.match('_[^_]', name)}
    return sorted({*public, *__all__} - {'importlib', 're'})


def __getattr__(name: str):
    if name in _FOUND_IN:
        return getattr(importlib.import_module(_FOUND_IN[name]), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
