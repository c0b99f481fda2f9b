"""Versions of the software that computes a run."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import types
from collections.abc import Mapping

import vit_jax

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


@functools.cache  # each save records them
def packages() -> Mapping[str, str]:
    """Versions of this package and of those that its results depend on."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return types.MappingProxyType({'vit_jax': vit_jax.__version__, **found})


def everything() -> dict[str, str]:
    """Versions of Python and of the packages."""
    return {'python': platform.python_version(), **packages()}
