"""Names around a model's own: of wrappers, of training states, of a student and its teacher.

A training script stores a model below names such as `module.` (data parallelism), `_orig_mod.`
(torch.compile), `state_dict.`, `model_ema.` or `teacher.backbone.`, stacked in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_jax.config.origin import AVERAGES, STUDENTS, WRAPPERS
from vit_jax.errors import UserError
from vit_jax.interop.files import Flat, brief

# Within names, before the parameters of a part of the model.
_INNER = re.compile(r'(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
_COUNTER = re.compile(r'(averaged|epoch|iter|iteration|step)$')  # of no use to a reader
_DEEPEST = 6
_LISTED = 4


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


def part(flat: Flat, name: str) -> Flat:
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
    others = [n for n in flat if not (n.startswith(prefix) or _COUNTER.search(n))]
    if not (rest := sorted(set(map(_head, others)))):
        return ''
    more = f' and {len(rest) - _LISTED} more' if len(rest) > _LISTED else ''
    unread = [_part([other, prefix]) for other in models if other != prefix]
    hint = f' (FILE:{unread[0]} reads that one)' if unread else ''
    return f'read below {prefix}; left out: {", ".join(rest[:_LISTED])}{more}{hint}'


def _head(name: str) -> str:
    """The wrappers of a name and its first own part, as in 'student.head'."""
    parts = name.split('.')
    own = next((i for i, word in enumerate(parts) if word not in WRAPPERS), len(parts))
    return brief('.'.join(parts[: own + 1]))
