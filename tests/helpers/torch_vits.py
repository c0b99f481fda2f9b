"""Parameters of our ViTs under the names and in the layouts of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from vit_jax.tree_paths import path_name

LETTERS = {'query': 'q_proj', 'key': 'k_proj', 'value': 'v_proj'}


def load_into(reference: Any, params: Any, names: Iterable[tuple[str, str]], no_key: bool) -> Any:
    """Give a module of transformers, made on the device 'meta', our parameters; all of them.

    Args:
      reference: the module.
      params: nested, with unrolled blocks.
      names: (regular expression, replacement) pairs, which are applied to our names one by one.
      no_key: whether the keys are projected without bias.
    """
    import torch

    state = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for name, array in _in_torch(path_name(path), np.asarray(leaf), no_key).items():
            for pattern, replacement in names:
                name = re.sub(pattern, replacement, name)
            state[name.replace('/', '.')] = torch.from_numpy(np.array(array))
    shapes = reference.state_dict()
    state = {k: v.reshape(shapes[k].shape) if k in shapes else v for k, v in state.items()}
    reference.load_state_dict(state, strict=True, assign=True)
    return reference.eval()


def images_for(images: Any) -> Any:
    """Images [B H W C] as a tensor [B C H W]."""
    import torch

    return torch.from_numpy(np.array(images).transpose(0, 3, 1, 2))


def _in_torch(name: str, array: np.ndarray, no_key: bool) -> dict[str, np.ndarray]:
    module, _, leaf = name.rpartition('/')
    if module.endswith('/qkv'):
        prefix = module[:-3]
        if leaf == 'bias':
            biased = [x for x in LETTERS.values() if not (no_key and x == 'k_proj')]
            return {f'{prefix}{x}.bias': b.ravel() for x, b in zip(biased, array, strict=True)}
        rows = (array[:, i].reshape(len(array), -1).T for i in range(3))
        return {f'{prefix}{x}.weight': row for x, row in zip(LETTERS.values(), rows, strict=True)}
    if module.endswith('/out') and leaf == 'kernel':
        array = array.reshape(-1, array.shape[-1])
    if leaf == 'kernel':
        array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
    ending = {'kernel': '.weight', 'scale': '.weight', 'bias': '.bias'}.get(leaf)
    return {f'{module}{ending}' if ending else name: array}
