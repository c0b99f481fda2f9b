"""Parameters of PyTorch's modules in the layouts of this package, and back.

A dense layer has a weight [out in] in PyTorch and a kernel [in out] here, a convolution [O I H W]
and [H W I O]; attention heads are folded into the features in PyTorch and have an axis here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names
from vit_jax.interop.files import Flat


class _Layout(NamedTuple):
    """Conversion of the arrays whose name, ours, matches `pattern`."""

    pattern: str
    # By the number of axes: their array and the number of heads, or our array.
    read: Mapping[int, Callable[[np.ndarray, int], np.ndarray]]
    write: Mapping[int, Callable[[np.ndarray], np.ndarray]]


_LAYOUTS = (
    _Layout(
        '.*/(query|key|value)/kernel',  # [D H K]
        {2: lambda w, heads: w.T.reshape(w.shape[1], heads, -1)},
        {3: lambda k: k.reshape(len(k), -1).T},
    ),
    _Layout(
        '.*/(query|key|value)/bias',  # [H K]
        {1: lambda b, heads: b.reshape(heads, -1)},
        {2: lambda b: b.reshape(-1)},
    ),
    _Layout(
        '.*/(attention|cross)/out/kernel',  # [H K D]
        {2: lambda w, heads: w.T.reshape(heads, -1, len(w))},
        {3: lambda k: k.reshape(-1, k.shape[-1]).T},
    ),
    # A 1 x 1 convolution there.
    _Layout(
        'input_proj/kernel',
        {4: lambda w, heads: w[..., 0, 0].T},
        {2: lambda k: k.T[..., None, None]},
    ),
    _Layout(
        '.*/kernel',
        {2: lambda w, heads: w.T, 4: lambda w, heads: w.transpose(2, 3, 1, 0)},
        {2: lambda k: k.T, 4: lambda k: k.transpose(3, 2, 0, 1)},
    ),
)
# Names of their fused projections, and of the parts.
_FUSED = {'qkv': 'qkv', 'kv': 'kv', 'in_proj': 'qkv'}


def ours(name: str, table: names.Table) -> str | None:
    """Our name of a parameter; None if no row of the table has it."""
    translated = names.ours(name, table)
    if translated is None:
        return None
    weight = '/scale' if re.search(r'norm(_?\d|_pre)?\.weight$', translated) else '/kernel'
    return translated.replace('.weight', weight).replace('.bias', '/bias')


def theirs(name: str, table: names.Table) -> str:
    """The name to write for our parameter; our own if the table has none."""
    translated = names.theirs(name, table) or name
    return re.sub('/(kernel|scale)$', '.weight', translated).replace('/bias', '.bias')


def parted(flat: Flat, source: str) -> Flat:
    """Their arrays with fused projections split: `attn.qkv.weight` into `attn.q.weight` and so on.

    Raises:
      UserError: if an array cannot be split.
    """
    parts: Flat = {}
    for name, array in flat.items():
        module, _, leaf = name.rpartition('.')
        parent, _, fused = module.rpartition('.')
        letters = _FUSED.get(fused, '')
        if not letters:
            parts[name] = array
        elif len(array) % len(letters):
            raise UserError(f'{source}: {name} cannot have shape {array.shape}')
        else:
            each = zip(letters, np.split(array, len(letters)), strict=True)
            parts |= {f'{parent}.{letter}.{leaf}': part for letter, part in each}
    return parts


def read(flat: Flat, table: names.Table, num_heads: int, source: str) -> Flat:
    """Arrays by our names and in our layouts, with split projections of attention.

    If no block has biases of its queries, keys or values, they get biases of zero.

    Raises:
      UserError: if a name is in no row, or an array has an impossible shape.
    """
    converted: Flat = {}
    for name, original in names.renamed(flat, lambda n: ours(n, table), source).items():
        layout, array = _layout(name), flat[original]
        try:
            converted[name] = layout.read[array.ndim](array, num_heads) if layout else array
        except (KeyError, ValueError):
            raise UserError(
                f'{source}: {original} cannot have shape {array.shape} ({num_heads} heads)'
            ) from None
    return converted | _absent_biases(converted)


def write(flat: Flat, table: names.Table) -> Flat:
    """The inverse of `read`, for parameters that the table has."""
    return {theirs(name, table): _written(name, array) for name, array in flat.items()}


def _written(name: str, array: np.ndarray) -> np.ndarray:
    layout = _layout(name)
    return np.ascontiguousarray(layout.write[array.ndim](array) if layout else array)


def _layout(name: str) -> _Layout | None:
    return next((layout for layout in _LAYOUTS if re.fullmatch(layout.pattern, name)), None)


def _absent_biases(flat: Flat) -> Flat:
    absent: Flat = {}
    for part in ('query', 'key', 'value'):
        kernels = [name for name in flat if name.endswith(f'/{part}/kernel')]
        biases = {n[:-6] + 'bias': np.zeros(flat[n].shape[1:], np.float32) for n in kernels}
        absent |= {} if biases.keys() & flat.keys() else biases
    return absent
