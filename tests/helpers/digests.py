"""The digest of a state, by which two runs are compared bit for bit."""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils


def tree_digest(tree) -> str:
    """The sha256 over path, dtype, shape and bytes of every leaf, whatever its sharding.

    Two states have the same digest only if they are bit-identical; every process of
    a run calls it and gets the same answer.
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = _to_host(leaf)
        total.update(f'{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n'.encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def _to_host(leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
