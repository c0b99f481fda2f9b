"""Parameter names in two code bases, attention projections, and names of wrappers.

Our names are '/'-joined here. The intermediate form of attention has separate `query`, `key` and
`value`, like other code bases; see `split`.
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
# starting at 0 or 1; '*' is any number, written as 0.
Table = tuple[tuple[str, str], ...]

# Our fused parameters and their parts.
_SELF: Mapping[str, tuple[str, ...]] = {'qkv': ('query', 'key', 'value')}
_CROSS: Mapping[str, tuple[str, ...]] = {'q': ('query',), 'kv': ('key', 'value')}
_WEIGHTS: Mapping[str, tuple[str, ...]] = {'qk': ('query', 'key')}
_MAX_NAMES = 3  # names


def to_ours(name: str, table: Table) -> str | None:
    """Translate their name to ours by the first matching row; None if no row matches."""
    for source, target in table:
        if not (match := _pattern(source).fullmatch(name)):
            continue
        *digits, suffix = match.groups()
        bases = re.findall(r'\{(\d)\}', source)
        counts = [int(n) - int(base) for n, base in zip(digits, bases, strict=True)]
        if all(count >= 0 for count in counts):
            for count, base in zip(counts, re.findall(r'\{(\d)\}', target), strict=False):
                target = target.replace(f'{{{base}}}', str(count + int(base)), 1)
            return target.replace('*', '0') + suffix
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """Compile a pattern with a group per index and a last group for the suffix."""
    text = re.sub(r'\\\{\d\\\}', r'(\\d+)', re.escape(template)).replace(r'\*', r'\d+')
    return re.compile(rf'{text}((?:[/.].+)?)')


def to_theirs(name: str, table: Table) -> str | None:
    """Translate our name to theirs by the first matching row; None if no row matches."""
    return to_ours(name, tuple((b, a) for a, b in table))


def file_names(translated: Mapping[str, str | None], source: str) -> dict[str, str]:
    """Return the names in the file, by our names.

    Args:
      translated: Our name for each name in the file; None if the model has no such part.
      source: Name of the file for messages.

    Raises:
      UserError: if a name has no translation, or two names have the same.
    """
    names_in_file: dict[str, str] = {}
    unknown = []
    for name, target in translated.items():
        if target is None:
            unknown.append(name)
        elif target in names_in_file:
            duplicates = f'{brief(names_in_file[target])} and {brief(name)}'
            raise UserError(f'{source}: {duplicates} mean the same parameter')
        else:
            names_in_file[target] = name
    if unknown:
        raise UserError(f'{source}: the model has no part called {format_names(unknown)}')
    return names_in_file


def rename(flat: Flat, table: Table, source: str) -> Flat:
    """Rename arrays to our names.

    Raises:
      UserError: if a name is in no row of the table, or two names are translated to the same.
    """
    names_in_file = file_names({name: to_ours(name, table) for name in flat}, source)
    return {target: flat[name] for target, name in names_in_file.items()}


def split(flat: Mapping[str, np.ndarray], no_bias: str = '') -> Flat:
    """Split fused projections: `attention/qkv/kernel` [D 3 H K] into `attention/query/kernel`
    [D H K] and so on, biases [3 H K] into [H K]. The parts are views.

    Args:
      flat: Arrays by our names.
      no_bias: Projections missing in a fused bias, see the model `vit`.
    """
    parts: Flat = {}
    for name, array in flat.items():
        parent, module, leaf = _parts(name)
        if module not in _fuse_projections(parent):
            parts[name] = array
            continue
        projections = _projections(parent, module, leaf, no_bias)
        rows = np.moveaxis(array, array.ndim - 3, 0)
        parts |= {
            f'{parent}/{part}/{leaf}': row for part, row in zip(projections, rows, strict=True)
        }
    return parts


def join(flat: Mapping[str, np.ndarray], no_bias: str = '') -> Flat:
    """Invert `split`.

    Raises:
      UserError: if a projection is missing.
    """
    result: Flat = {}
    for name, array in flat.items():
        parent, module, leaf = _parts(name)
        fused = next(
            (key for key, parts in _fuse_projections(parent).items() if module in parts), None
        )
        if fused is None:
            result[name] = array
        elif (fused_name := f'{parent}/{fused}/{leaf}') not in result:
            parts = _projections(parent, fused, leaf, no_bias)
            arrays = [require(flat, f'{parent}/{part}/{leaf}') for part in parts]
            result[fused_name] = np.stack(arrays, axis=array.ndim - 2)
    return result


def _projections(parent: str, fused: str, leaf: str, no_bias: str) -> list[str]:
    """Return the projections in a fused kernel or bias."""
    parts = _fuse_projections(parent)
    absent = no_bias.split('|') if leaf == 'bias' and parts is _SELF else []
    return [part for part in parts[fused] if part not in absent]


def require(flat: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the array of this name.

    Raises:
      UserError: if the array is missing.
    """
    if name not in flat:
        raise UserError(f'{name} is missing; download the file again')
    return flat[name]


def flatten(params: Mapping[str, Any], no_bias: str = '') -> Flat:
    """Flatten a tree of our parameters to float32 arrays by name, unrolled, projections split."""
    flat = flatten_dict(params, sep='/')
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flat.items()}
    return split(unroll(arrays), no_bias)


def empty_arrays(shapes: Mapping[str, Any], no_bias: str = '') -> Flat:
    """Return arrays with the shapes of a tree of our parameters, named as by `flatten`.

    They are views of a number and take no memory.
    """
    leaves = flatten_dict(shapes, sep='/').items()
    views = {name: np.broadcast_to(np.float32(0), leaf.shape) for name, leaf in leaves}
    return split(unroll(views), no_bias)


def nest(flat: Mapping[str, np.ndarray], no_bias: str = '') -> dict[str, Any]:
    """Invert `flatten`.

    Raises:
      UserError: if a projection is missing.
    """
    tree: dict[str, Any] = unflatten_dict(join(flat, no_bias), sep='/')
    return tree


def format_names(names: list[str]) -> str:
    """Join the first few names, shortening long ones, as in damaged files."""
    more = f' and {len(names) - _MAX_NAMES} more' if len(names) > _MAX_NAMES else ''
    return ', '.join(map(brief, names[:_MAX_NAMES])) + more


def _fuse_projections(parent: str) -> Mapping[str, tuple[str, ...]]:
    """Return the fused projections of an attention module; none for any other module."""
    if parent == 'map_head/attention' or parent.endswith('/cross'):
        return _CROSS
    if parent == 'bbox_attention':
        return _WEIGHTS
    return _SELF if parent.endswith('/attention') else {}


def _parts(name: str) -> tuple[str, str, str]:
    """Split 'a/b/c/d' into 'a/b', 'c', 'd'."""
    module, _, leaf = name.rpartition('/')
    parent, _, module = module.rpartition('/')
    return parent, module, leaf


def shape_of(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str], name: str, ndim: int
) -> tuple[int, ...]:
    """Return the shape of a parameter.

    Args:
      flat: Arrays by our names.
      source: Name of the file for messages.
      label: Function from our name to the parameter's name for messages.
      name: Our name of the parameter.
      ndim: Number of axes.

    Raises:
      UserError: if the parameter is missing, or has a different number of axes.
    """
    if name not in flat:
        raise UserError(f'{source}: {label(name)} is not in the file')
    if flat[name].ndim != ndim:
        raise UserError(f'{source}: {label(name)} cannot have shape {flat[name].shape}')
    return flat[name].shape


def stage_depths(names: Iterable[str], prefix: str = '') -> tuple[int, ...]:
    """Count the blocks in each stage of a ResNet, by the names below `prefix`.

    Raises:
      UserError: if a number is impossible.
    """
    indices = range(count_blocks(names, rf'{prefix}stage_(\d+)/'))
    return tuple(count_blocks(names, rf'{prefix}stage_{i}/block_(\d+)/') for i in indices)


def count_blocks(names: Iterable[str], pattern: str) -> int:
    """Return one more than the highest index that `pattern` matches at the start of a name.

    Raises:
      UserError: if it exceeds the number of names: a small file could name any block.
    """
    matches = [re.match(pattern, name) for name in names]
    highest = max((int(match[1]) for match in matches if match), default=-1)
    if highest >= len(matches):
        raise UserError(f'there is a block {highest}, but only {len(matches)} arrays in total')
    return highest + 1


def patch_shape(
    flat: Mapping[str, np.ndarray], source: str, label: Callable[[str], str]
) -> tuple[int, int]:
    """Return the side of a patch in pixels, and the width of its token.

    Raises:
      UserError: if patches are not square, or see `shape_of`.
    """
    rows, columns, _, width = shape_of(flat, source, label, 'patch_embed/kernel', 4)
    if rows != columns:
        raise UserError(f'{source}: patches of {columns} x {rows} pixels: must be square')
    return rows, width


# Training scripts put wrappers around a model's names, such as `module.` (data parallelism) or
# `_orig_mod.` (torch.compile), keys of a training state, such as `state_dict.` or `model_ema.`, and
# a student and its teacher, nested in any order.

# Inside of names, before the parameters of a part of the model.
_INNER = re.compile(r'(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_COUNTER = re.compile(r'(averaged|epoch|iter|iteration|step)$')  # training state, not reported
_DEEPEST = 6


def unwrap(flat: Flat, is_known: Callable[[Flat], bool]) -> tuple[Flat, str, str]:
    """Return the arrays of the only model below names of wrappers.

    Averages and teachers are preferred, since these are evaluated and published.

    Args:
      flat: Arrays by name.
      is_known: Function that returns whether a family reads arrays of these names.

    Returns:
      The arrays by the model's own names; the removed prefix, such as 'teacher.backbone.'; and a
      line about ignored arrays, or an empty string. The prefix is empty if there is no such model.

    Raises:
      UserError: if there are several models, and none is preferred.
    """
    unwrapped = {_INNER.sub('', name): array for name, array in flat.items()}
    unwrapped = unwrapped if len(unwrapped) == len(flat) else flat
    models = dict(_models(unwrapped, is_known))
    if not models:
        return flat, '', ''
    best = min(map(_rank, models))
    preferred = [prefix for prefix in models if _rank(prefix) == best]
    if len(preferred) > 1:
        parts = ' and '.join(preferred)
        raise UserError(
            f'{parts} are several models: choose one, such as FILE:{_distinct_part(preferred)}'
        )
    (prefix,) = preferred
    return models[prefix], prefix or '_orig_mod.', _describe_ignored(unwrapped, prefix, [*models])


def select_part(flat: Flat, name: str) -> Flat:
    """Return the arrays below a wrapper of this name at any depth, as in `FILE:teacher`.

    Raises:
      UserError: if there is no such wrapper.
    """
    pattern = re.compile(rf'(?:(?:{"|".join(WRAPPERS)})\.)*?{name}\.')
    matches = {key: pattern.match(key) for key in flat}
    if below := {key[match.end() :]: flat[key] for key, match in matches.items() if match}:
        return below
    examples = ', '.join(sorted({key.partition('.')[0] for key in flat})[:_MAX_NAMES])
    raise UserError(f'the file has no part {name!r} (it has: {examples})')


def common_prefix(flat: Mapping[str, Any]) -> str:
    """Return the first part that all names share, such as 'module.'; empty if there is none."""
    firsts = {name.partition('.')[0] for name in flat if '.' in name}
    is_common = len(firsts) == 1 and len(flat) > 1 and all('.' in name for name in flat)
    return f'{brief(firsts.pop())}.' if is_common else ''


def _models(
    flat: Flat, is_known: Callable[[Flat], bool], prefix: str = '', depth: int = 0
) -> Iterator[tuple[str, Flat]]:
    """Yield the models below wrappers, with their prefixes."""
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


def _distinct_part(prefixes: list[str]) -> str:
    """Return a name that only the first of these prefixes has."""
    first_words, other_words = (
        prefixes[0].split('.'),
        {x for p in prefixes[1:] for x in p.split('.')},
    )
    return next((name for name in first_words if name not in other_words), first_words[0])


def _describe_ignored(flat: Flat, prefix: str, models: list[str]) -> str:
    """Describe the arrays that are not below the prefix; empty if there are none."""
    unread = [other for other in models if other != prefix]
    ignored = [n for n in flat if not (n.startswith(prefix) or _COUNTER.search(n))]
    labels = {
        next((x[:-1] for x in unread if n.startswith(x)), None) or _wrapper_path(n) for n in ignored
    }
    if not labels:
        return ''
    more = f' and {len(labels) - _MAX_NAMES} more' if len(labels) > _MAX_NAMES else ''
    hint = f' (FILE:{_distinct_part([unread[0], prefix])} reads that one)' if unread else ''
    return f'read below {prefix}; ignored: {", ".join(sorted(labels)[:_MAX_NAMES])}{more}{hint}'


def _wrapper_path(name: str) -> str:
    """Return the wrappers of a name and the first part after them, such as 'student.head'."""
    parts = name.split('.')
    own_index = next((i for i, word in enumerate(parts) if word not in WRAPPERS), len(parts))
    return brief('.'.join(parts[: own_index + 1]))
