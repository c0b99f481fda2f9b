"""Parameters of PyTorch's modules in the layouts of this package, and back.

A dense layer has a weight [out in] in PyTorch and a kernel [in out] here; a convolution has
[O I H W] there and [H W I O] here. Attention heads are part of the features in PyTorch and have an
axis of their own here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names
from vit_jax.interop.files import Flat

# Layouts of parameters by our names, as regular expressions; the first match counts.
_LAYOUTS = (
    ('.*/(query|key|value)/kernel', 'D H K'),
    ('.*/(query|key|value)/bias', 'H K'),
    ('.*/(attention|cross)/out/kernel', 'H K D'),
    ('input_proj/kernel', '1 x 1'),  # a convolution in PyTorch, a dense layer here
    ('.*/kernel', 'kernel'),
)
# Names of PyTorch's fused projections, and of their parts.
_FUSED = {'qkv': 'qkv', 'kv': 'kv', 'in_proj': 'qkv'}


def ours(name: str, table: names.Table) -> str | None:
    """Our name of their parameter; None if no row of the table has it."""
    translated = names.ours(name, table)
    if translated is None:
        return None
    weight = '/scale' if re.search(r'norm(_?\d|_pre)?\.weight$', translated) else '/kernel'
    return translated.replace('.weight', weight).replace('.bias', '/bias')


def theirs(name: str, table: names.Table) -> str:
    """Their name of our parameter; our own if the table has none."""
    translated = names.theirs(name, table) or name
    return re.sub('/(kernel|scale)$', '.weight', translated).replace('/bias', '.bias')


def parted(flat: Flat, source: str) -> Flat:
    """Split fused projections of their arrays: `attn.qkv.weight` into `attn.q.weight` and so on.

    Those of torch.nn.MultiheadAttention, such as `attn.in_proj_weight`, are split too.

    Raises:
      UserError: if an array cannot be split.
    """
    parts: Flat = {}
    for name, array in flat.items():
        module, _, leaf = name.replace('.in_proj_', '.in_proj.').rpartition('.')
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


def fused(parts: Flat, modules: Mapping[str, str]) -> Flat:
    """The inverse of `parted`.

    Args:
      parts: arrays by PyTorch's names.
      modules: the fused projection of each module of attention, as {'attn': 'qkv'}.
    """
    whole: Flat = {}
    pattern = re.compile(rf'((?:.*\.)?({"|".join(modules)}))\.([qkv])\.(\w+)')
    for name, array in parts.items():
        if not (match := pattern.fullmatch(name)):
            whole[name] = array
            continue
        parent, module, letter, leaf = match.groups()
        letters = _FUSED[modules[module]]
        if letter not in letters:
            whole[name] = array
        elif letter == letters[0]:
            each = [parts[f'{parent}.{one}.{leaf}'] for one in letters]
            joined = f'{parent}.{modules[module]}.{leaf}'.replace('.in_proj.', '.in_proj_')
            whole[joined] = np.concatenate(each)
    return whole


def read(flat: Flat, table: names.Table, num_heads: int, source: str) -> Flat:
    """Arrays by our names and in our layouts, with split projections of attention.

    Raises:
      UserError: if a name is in no row, or an array has an impossible shape.
    """
    converted: Flat = {}
    in_file = names.renamed({name: ours(name, table) for name in flat}, source)
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
    """The inverse of `read`, for parameters that the table has."""
    return {
        theirs(name, table): np.ascontiguousarray(_to_torch(name, array))
        for name, array in flat.items()
    }


def _layout(name: str) -> str:
    """The layout of a parameter of this name; empty if it is the same in PyTorch."""
    return next((layout for pattern, layout in _LAYOUTS if re.fullmatch(pattern, name)), '')


def _from_torch(name: str, array: np.ndarray, num_heads: int) -> np.ndarray:
    """A parameter, whose name is ours, in our layout; raises ValueError for impossible shapes."""
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
        case 'kernel', 2:
            return array.T
        case 'kernel', 4:
            return array.transpose(2, 3, 1, 0)
    raise ValueError(f'{name} cannot have shape {array.shape}')


def _to_torch(name: str, array: np.ndarray) -> np.ndarray:
    """The inverse of `_from_torch`."""
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
        case 'kernel', 2:
            return array.T
        case 'kernel', 4:
            return array.transpose(3, 2, 0, 1)
    raise ValueError(f'{name} cannot have shape {array.shape}')
