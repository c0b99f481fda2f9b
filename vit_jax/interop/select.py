"""Parts of a checkpoint for parts of a model: the text of `config.init.select`.

`encoder` takes all parameters below `encoder` for the same place in the model,
`encoder->backbone/encoder` for another place, `backbone->` for the top, and `->backbone` takes the
whole checkpoint for a part of the model. `encoder/block_*` takes all matching parts below
`encoder`. Several are separated by commas. Each part is taken whole, and the other parts of the
model start anew.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.errors import UserError

Flat = dict[str, Any]  # '/'-joined path -> array or shape


def pick(have: Flat, want: Flat, select: str) -> tuple[Flat, Flat, list[str]]:
    """The parameters that are selected.

    Args:
      have: of the checkpoint, blocks unrolled.
      want: of the model, blocks unrolled.
      select: see above.

    Returns:
      The selected parameters of `have` under their new paths, the matching ones of `want`, and
      notes for people on the parameters that are read or not.

    Raises:
      UserError: if a path does not exist, or two parts are for the same parameter.
    """
    taken: Flat = {}
    wanted: Flat = {}
    notes = []
    for theirs, ours in _parse(select):
        part, place = _below(have, theirs, 'the checkpoint'), _below(want, ours, 'the model')
        moved = {_joined(_plain(ours), rest): leaf for rest, leaf in part.items()}
        if twice := sorted(moved.keys() & taken.keys()):
            raise UserError(f'select={select!r}: two parts are for {twice[0]}')
        taken |= moved
        wanted |= {_joined(_plain(ours), rest): leaf for rest, leaf in place.items()}
        origin = f' from {theirs or "the top"}' if theirs != ours else ''
        notes.append(f'{ours or "the model"}: {len(part)} parameters read{origin}')
    if anew := _subtrees(want.keys() - wanted.keys(), wanted):
        notes.append(f'{", ".join(anew)}: not selected, starts anew')
    return taken, wanted, notes


def _parse(select: str) -> list[tuple[str, str]]:
    """Pairs (path in the checkpoint, path in the model)."""
    pairs = []
    for text in select.split(','):
        theirs, arrow, ours = (part.strip().strip('/') for part in text.partition('->'))
        if not (theirs or arrow) or '->' in ours:
            raise UserError(f'select={select!r}: write PATH or THEIRS->OURS, separated by commas')
        pairs.append((theirs, ours if arrow else theirs))
    return pairs


def _below(flat: Mapping[str, Any], path: str, owner: str) -> Flat:
    """Parameters by the rest of their path; all of them below the empty one."""
    found = {
        name[len(_plain(path)) :].lstrip('/'): leaf
        for name, leaf in flat.items()
        if not path or any(fnmatch.fnmatchcase(prefix, path) for prefix in _prefixes(name))
    }
    if not found:
        known = {part for name in flat for part in _prefixes(name)}
        close = difflib.get_close_matches(path, sorted(known), n=1, cutoff=0.5)
        hint = f'; did you mean {close[0]!r}?' if close else ''
        top = ', '.join(sorted({name.partition('/')[0] for name in flat}))
        raise UserError(f'select: {owner} has no parameters below {path!r}{hint} (it has: {top})')
    return found


def _plain(path: str) -> str:
    """The part of a path before a pattern."""
    return path.partition('*')[0].rpartition('/')[0] if '*' in path else path


def _subtrees(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest paths that contain all of `names` and none of `others`."""
    taken = {prefix for name in others for prefix in _prefixes(name)}
    return sorted({next(p for p in _prefixes(name) if p not in taken) for name in names})


def _prefixes(name: str) -> list[str]:
    """'a', 'a/b' and 'a/b/c' of 'a/b/c'."""
    parts = name.split('/')
    return ['/'.join(parts[: i + 1]) for i in range(len(parts))]


def _joined(path: str, rest: str) -> str:
    return '/'.join(part for part in (path, rest) if part)
