"""Conversion of PyTorch parameters to the layouts of this package, and back.

A dense layer has a weight [out in] in PyTorch and a kernel [in out] here; a convolution has
[O I H W] there and [H W I O] here, a transposed one [I O H W] there. Attention heads are part of
the feature axis in PyTorch and a separate axis here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names
from vit_jax.interop.files import Flat

# Layouts of parameters by our names, as regular expressions; the first match wins.
_LAYOUTS = (
    ('.*/(query|key|value)/kernel', 'D H K'),
    ('.*/(query|key|value)/bias', 'H K'),
    ('.*/(attention|cross)/out/kernel', 'H K D'),
    ('input_proj/kernel', '1 x 1'),  # a convolution in PyTorch, a dense layer here
    ('.*/enlarge/kernel', 'transposed'),
    ('.*/kernel', 'kernel'),
)
# PyTorch's fused projections and their parts.
_FUSED = {'qkv': 'qkv', 'kv': 'kv', 'in_proj': 'qkv'}


def to_ours(name: str, table: names.Table) -> str | None:
    """Translate their name to ours; None if no row of the table matches."""
    translated = names.to_ours(name, table)
    if translated is None:
        return None
    weight = '/scale' if re.search(r'norm(_?\d|_pre)?\.weight$', translated) else '/kernel'
    return translated.replace('.weight', weight).replace('.bias', '/bias')


def to_theirs(name: str, table: names.Table) -> str:
    """Translate our name to theirs; use ours if no row of the table matches."""
    translated = names.to_theirs(name, table) or name
    return re.sub('/(kernel|scale)$', '.weight', translated).replace('/bias', '.bias')


def split_fused(flat: Flat, source: str) -> Flat:
    """Split fused projections: `attn.qkv.weight` into `attn.q.weight` and so on.

    This includes torch.nn.MultiheadAttention, such as `attn.in_proj_weight`.

    Raises:
      UserError: if an array cannot be split.
    """
    result: Flat = {}
    for name, array in flat.items():
        module, _, leaf = name.replace('.in_proj_', '.in_proj.').rpartition('.')
        parent, _, fused = module.rpartition('.')
        letters = _FUSED.get(fused, '')
        if not letters:
            result[name] = array
        elif len(array) % len(letters):
            raise UserError(f'{source}: {name} cannot have shape {array.shape}')
        else:
            letter_arrays = zip(letters, np.split(array, len(letters)), strict=True)
            result |= {f'{parent}.{letter}.{leaf}': part for letter, part in letter_arrays}
    return result


def join_fused(parts: Flat, modules: Mapping[str, str]) -> Flat:
    """Invert `split_fused`.

    Args:
      parts: Arrays by PyTorch's names.
      modules: Fused projection of each attention module, such as {'attn': 'qkv'}.
    """
    result: Flat = {}
    pattern = re.compile(rf'((?:.*\.)?({"|".join(modules)}))\.([qkv])\.(\w+)')
    for name, array in parts.items():
        if not (match := pattern.fullmatch(name)):
            result[name] = array
            continue
        parent, module, letter, leaf = match.groups()
        letters = _FUSED[modules[module]]
        if letter not in letters:
            result[name] = array
        elif letter == letters[0]:
            letter_arrays = [parts[f'{parent}.{part}.{leaf}'] for part in letters]
            fused_name = f'{parent}.{modules[module]}.{leaf}'.replace('.in_proj.', '.in_proj_')
            result[fused_name] = np.concatenate(letter_arrays)
    return result


def read(flat: Flat, table: names.Table, num_heads: int, source: str) -> Flat:
    """Convert arrays to our names and layouts, with split attention projections.

    Raises:
      UserError: if a name is in no row, or an array has an impossible shape.
    """
    converted: Flat = {}
    in_file = names.file_names({name: to_ours(name, table) for name in flat}, source)
    for name, original in in_file.items():
        array = flat[original]
        try:
            converted[name] = _from_torch(name, array, num_heads)
        except ValueError:
            raise UserError(
                f'{source}: {original} cannot have shape {array.shape} ({num_heads} heads)'
            ) from None
    return converted


def write(flat: Flat, table: names.Table) -> Flat:
    """Invert `read` for parameters that the table has."""
    return {
        to_theirs(name, table): np.ascontiguousarray(_to_torch(name, array))
        for name, array in flat.items()
    }


def _layout(name: str) -> str:
    """Return the layout of a parameter; empty if it is the same in PyTorch."""
    return next((layout for pattern, layout in _LAYOUTS if re.fullmatch(pattern, name)), '')


def _from_torch(name: str, array: np.ndarray, num_heads: int) -> np.ndarray:
    """Convert a parameter with one of our names to our layout; raise ValueError if it cannot be."""
    match _layout(name), array.ndim:
        case '', _:
            return array
        case 'D H K', 2:
            return array.T.reshape(array.shape[1], num_heads, -1)
        case 'H K', 1:
            return array.reshape(num_heads, -1)
        case 'H K D', 2:
            return array.T.reshape(num_heads, -1, len(array))
        case '1 x 1', 4:
            return array[..., 0, 0].T
        case 'transposed', 4:
            return array.transpose(2, 3, 0, 1)
        case 'kernel', 2:
            return array.T
        case 'kernel', 4:
            return array.transpose(2, 3, 1, 0)
    raise ValueError(f'{name} cannot have shape {array.shape}')


def _to_torch(name: str, array: np.ndarray) -> np.ndarray:
    """Invert `_from_torch`."""
    match _layout(name), array.ndim:
        case '', _:
            return array
        case 'D H K', 3:
            return array.reshape(len(array), -1).T
        case 'H K', 2:
            return array.reshape(-1)
        case 'H K D', 3:
            return array.reshape(-1, array.shape[-1]).T
        case '1 x 1', 2:
            return array.T[..., None, None]
        case 'transposed', 4:
            return array.transpose(2, 3, 0, 1)
        case 'kernel', 2:
            return array.T
        case 'kernel', 4:
            return array.transpose(3, 2, 0, 1)
    raise ValueError(f'{name} cannot have shape {array.shape}')
