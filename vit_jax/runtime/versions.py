"""Versions of the software that computes a run."""

from __future__ import annotations

import importlib.metadata
import platform

import vit_jax

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


def packages() -> dict[str, str]:
    """Versions of this package and of those that its results depend on."""
    return {
        'vit_jax': vit_jax.__version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def everything() -> dict[str, str]:
    """Versions of Python and of the packages."""
    return {'python': platform.python_version(), **packages()}
