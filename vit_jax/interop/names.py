"""Names of parameters in two code bases, projections of attention, and names of wrappers.

Our names are '/'-joined here. In between, attention has a form of its own, see `split`: separate
`query`, `key` and `value`, as other code bases store them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.interop.files import Flat, brief
from vit_jax.storage.model_ref import AVERAGES, STUDENTS, WRAPPERS
from vit_jax.tree_paths import unroll

# Rows (theirs, ours) of modules or parameters. '{0}' and '{1}' are the same index on both sides,
# starting at 0 or 1; '*' is any number, which is written as 0.
Table = tuple[tuple[str, str], ...]

# Our fused parameters and their parts.
_SELF: Mapping[str, tuple[str, ...]] = {'qkv': ('query', 'key', 'value')}
_CROSS: Mapping[str, tuple[str, ...]] = {'q': ('query',), 'kv': ('key', 'value')}
_WEIGHTS: Mapping[str, tuple[str, ...]] = {'qk': ('query', 'key')}
_LISTED = 3  # names


def ours(name: str, table: Table) -> str | None:
    """Our name for their parameter, by the first row that has it; None if none has."""
    for source, target in table:
        if not (match := _pattern(source).fullmatch(name)):
            continue
        *digits, rest = match.groups()
        bases = re.findall(r'\{(\d)\}', source)
        counts = [int(n) - int(base) for n, base in zip(digits, bases, strict=True)]
        if all(count >= 0 for count in counts):
            for count, base in zip(counts, re.findall(r'\{(\d)\}', target), strict=False):
                target = target.replace(f'{{{base}}}', str(count + int(base)), 1)
            return target.replace('*', '0') + rest
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """Matches a name and its rest; a group for each index, the last for the rest."""
    text = re.sub(r'\\\{\d\\\}', r'(\\d+)', re.escape(template)).replace(r'\*', r'\d+')
    return re.compile(rf'{text}((?:[/.].+)?)')


def theirs(name: str, table: Table) -> str | None:
    """Their name for our parameter, by the first row that has it; None if none has."""
    return ours(name, tuple((b, a) for a, b in table))


def renamed(translated: Mapping[str, str | None], source: str) -> dict[str, str]:
    """Names in the file by our names.

    Args:
      translated: our name for each name in the file; None if the model has no such part.
      source: the name of the file for messages.

    Raises:
      UserError: if a name has no translation, or two names have the same one.
    """
    found: dict[str, str] = {}
    unknown = []
    for name, target in translated.items():
        if target is None:
            unknown.append(name)
        elif target in found:
            both = f'{brief(found[target])} and {brief(name)}'
            raise UserError(f'{source}: {both} mean the same parameter')
        else:
            found[target] = name
    if unknown:
        raise UserError(f'{source}: the model has no part called {listed(unknown)}')
    return found


def rename(flat: Flat, table: Table, source: str) -> Flat:
    """Arrays by our names.

    Raises:
      UserError: if a name is in no row of the table, or two names are the same of ours.
    """
    found = renamed({name: ours(name, table) for name in flat}, source)
    return {target: flat[name] for target, name in found.items()}


def split(flat: Mapping[str, np.ndarray], no_bias: str = '') -> Flat:
    """Split fused projections: `attention/qkv/kernel` [D 3 H K] into `attention/query/kernel`
    [D H K] and so on, biases [3 H K] into [H K]. The parts are views.

    Args:
      flat: arrays by our names.
      no_bias: projections without a row in a fused bias, see the model `vit`.
    """
    parted: Flat = {}
    for name, array in flat.items():
        parent, module, leaf = _parts(name)
        if module not in _fused(parent):
            parted[name] = array
            continue
        parts = _projections(parent, module, leaf, no_bias)
        rows = np.moveaxis(array, array.ndim - 3, 0)
        parted |= {f'{parent}/{part}/{leaf}': row for part, row in zip(parts, rows, strict=True)}
    return parted


def join(flat: Mapping[str, np.ndarray], no_bias: str = '') -> Flat:
    """The inverse of `split`.

    Raises:
      UserError: if a projection is absent.
    """
    joined: Flat = {}
    for name, array in flat.items():
        parent, module, leaf = _parts(name)
        fused = next((key for key, parts in _fused(parent).items() if module in parts), None)
        if fused is None:
            joined[name] = array
        elif (whole := f'{parent}/{fused}/{leaf}') not in joined:
            parts = _projections(parent, fused, leaf, no_bias)
            arrays = [require(flat, f'{parent}/{part}/{leaf}') for part in parts]
            joined[whole] = np.stack(arrays, axis=array.ndim - 2)
    return joined


def _projections(parent: str, fused: str, leaf: str, no_bias: str) -> list[str]:
    """The projections that a fused kernel or bias holds."""
    parts = _fused(parent)
    absent = no_bias.split('|') if leaf == 'bias' and parts is _SELF else []
    return [part for part in parts[fused] if part not in absent]


def require(flat: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The array of this name.

    Raises:
      UserError: if it is absent.
    """
    if name not in flat:
        raise UserError(f'{name} is absent; get the file again')
    return flat[name]


def flattened(params: Mapping[str, Any], no_bias: str = '') -> Flat:
    """A tree of our parameters as float32 arrays by name: unrolled, with split projections."""
    flat = flatten_dict(params, sep='/')
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flat.items()}
    return split(unroll(arrays), no_bias)


def empty_arrays(shapes: Mapping[str, Any], no_bias: str = '') -> Flat:
    """Arrays in the shapes of a tree of our parameters, named as by `flattened`: views of a number,
    which take no memory.
    """
    leaves = flatten_dict(shapes, sep='/').items()
    views = {name: np.broadcast_to(np.float32(0), leaf.shape) for name, leaf in leaves}
    return split(unroll(views), no_bias)


def nested(flat: Mapping[str, np.ndarray], no_bias: str = '') -> dict[str, Any]:
    """The inverse of `flattened`.

    Raises:
      UserError: if a projection is absent.
    """
    tree: dict[str, Any] = unflatten_dict(join(flat, no_bias), sep='/')
    return tree


def listed(names: list[str]) -> str:
    """The first few names, as text, each cut short if it is long, as in damaged files."""
    more = f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''
    return ', '.join(map(brief, names[:_LISTED])) + more


def _fused(parent: str) -> Mapping[str, tuple[str, ...]]:
    """The fused projections of an attention module; none for any other module."""
    if parent == 'map_head/attention' or parent.endswith('/cross'):
        return _CROSS
    if parent == 'bbox_attention':
        return _WEIGHTS
    return _SELF if parent.endswith('/attention') else {}


def _parts(name: str) -> tuple[str, str, str]:
    """'a/b/c/d' as 'a/b', 'c', 'd'."""
    module, _, leaf = name.rpartition('/')
    parent, _, module = module.rpartition('/')
    return parent, module, leaf


def shape_of(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str], name: str, ndim: int
) -> tuple[int, ...]:
    """The shape of a parameter.

    Args:
      flat: arrays by our names.
      source: the name of the file for messages.
      label: our name -> the parameter's name for messages.
      name: our name of the parameter.
      ndim: number of axes.

    Raises:
      UserError: if it is missing, or has another number of axes.
    """
    if name not in flat:
        raise UserError(f'{source}: {label(name)} is not in the file')
    if flat[name].ndim != ndim:
        raise UserError(f'{source}: {label(name)} cannot have shape {flat[name].shape}')
    return flat[name].shape


def stages(names: Iterable[str], prefix: str = '') -> tuple[int, ...]:
    """The number of blocks in each stage of a ResNet, by the names below `prefix`.

    Raises:
      UserError: if there cannot be so many.
    """
    indices = range(count(names, rf'{prefix}stage_(\d+)/'))
    return tuple(count(names, rf'{prefix}stage_{i}/block_(\d+)/') for i in indices)


def count(names: Iterable[str], pattern: str) -> int:
    """One more than the highest index that `pattern` matches at the beginning of a name.

    Raises:
      UserError: if it is higher than the number of names: a small file could name any block.
    """
    found = [re.match(pattern, name) for name in names]
    highest = max((int(match[1]) for match in found if match), default=-1)
    if highest >= len(found):
        raise UserError(f'there is a block {highest}, but only {len(found)} arrays in all')
    return highest + 1


def patches(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str]
) -> tuple[int, int]:
    """Side of a patch in pixels, and width of its token.

    Raises:
      UserError: if patches are not square, or as `shape_of`.
    """
    rows, columns, _, width = shape_of(flat, source, label, 'patch_embed/kernel', 4)
    if rows != columns:
        raise UserError(f'{source}: patches of {columns} x {rows} pixels; only squares work')
    return rows, width


# What training scripts put around a model's own names: wrappers such as `module.` (data
# parallelism) or `_orig_mod.` (torch.compile), keys of a training state such as `state_dict.` or
# `model_ema.`, and a student and its teacher, stacked in any order.

# Within names, before the parameters of a part of the model.
_INNER = re.compile(r'(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_COUNTER = re.compile(r'(averaged|epoch|iter|iteration|step)$')  # of no use to a reader
_DEEPEST = 6


def unwrapped(flat: Flat, is_known: Callable[[Flat], bool]) -> tuple[Flat, str, str]:
    """The arrays of the one model below names of wrappers.

    Averages and teachers are preferred, as these are what is evaluated and published.

    Args:
      flat: arrays by name.
      is_known: whether a family reads arrays of these names.

    Returns:
      The arrays by the model's own names; the prefix that was removed, such as 'teacher.backbone.';
      and a line about what was left out, or an empty string. An empty prefix if there is no such
      model.

    Raises:
      UserError: if there are several models, none of which is preferred.
    """
    plain = {_INNER.sub('', name): array for name, array in flat.items()}
    plain = plain if len(plain) == len(flat) else flat
    found = dict(_models(plain, is_known))
    if not found:
        return flat, '', ''
    best = min(map(_rank, found))
    chosen = [prefix for prefix in found if _rank(prefix) == best]
    if len(chosen) > 1:
        parts = ' and '.join(chosen)
        raise UserError(f'holds several models, below {parts}: name one, as FILE:{_part(chosen)}')
    (prefix,) = chosen
    return found[prefix], prefix or '_orig_mod.', _left_out(plain, prefix, [*found])


def part_of(flat: Flat, name: str) -> Flat:
    """The arrays below a wrapper of this name, whatever is around it, as in `FILE:teacher`.

    Raises:
      UserError: if there is none.
    """
    pattern = re.compile(rf'(?:(?:{"|".join(WRAPPERS)})\.)*?{name}\.')
    matched = {key: pattern.match(key) for key in flat}
    if below := {key[match.end() :]: flat[key] for key, match in matched.items() if match}:
        return below
    first = ', '.join(sorted({key.partition('.')[0] for key in flat})[:_LISTED])
    raise UserError(f'there is no part {name!r} in the file (it holds: {first})')


def common_prefix(flat: Mapping[str, Any]) -> str:
    """The first part that all names have, such as 'module.'; empty if they have none."""
    firsts = {name.partition('.')[0] for name in flat if '.' in name}
    is_common = len(firsts) == 1 and len(flat) > 1 and all('.' in name for name in flat)
    return f'{brief(firsts.pop())}.' if is_common else ''


def _models(
    flat: Flat, is_known: Callable[[Flat], bool], prefix: str = '', depth: int = 0
) -> Iterator[tuple[str, Flat]]:
    """The models below wrappers, by their prefix."""
    if is_known(flat):
        yield prefix, flat
        return
    for name in WRAPPERS if depth < _DEEPEST else ():
        start = f'{name}.'
        if below := {k.removeprefix(start): v for k, v in flat.items() if k.startswith(start)}:
            yield from _models(below, is_known, prefix + start, depth + 1)


def _rank(prefix: str) -> int:
    names = set(prefix.split('.'))
    return 0 if names & set(AVERAGES) else 2 if names & set(STUDENTS) else 1


def _part(prefixes: list[str]) -> str:
    """A name that only the first of these prefixes has."""
    first, others = prefixes[0].split('.'), {x for p in prefixes[1:] for x in p.split('.')}
    return next((name for name in first if name not in others), first[0])


def _left_out(flat: Flat, prefix: str, models: list[str]) -> str:
    """A line about the arrays that are not below the prefix; empty if there are none."""
    unread = [other for other in models if other != prefix]
    kept = [n for n in flat if not (n.startswith(prefix) or _COUNTER.search(n))]
    rest = {next((x[:-1] for x in unread if n.startswith(x)), None) or _head(n) for n in kept}
    if not rest:
        return ''
    more = f' and {len(rest) - _LISTED} more' if len(rest) > _LISTED else ''
    hint = f' (FILE:{_part([unread[0], prefix])} reads that one)' if unread else ''
    return f'read below {prefix}; left out: {", ".join(sorted(rest)[:_LISTED])}{more}{hint}'


def _head(name: str) -> str:
    """The wrappers of a name and its first own part, as in 'student.head'."""
    parts = name.split('.')
    own = next((i for i, word in enumerate(parts) if word not in WRAPPERS), len(parts))
    return brief('.'.join(parts[: own + 1]))
