"""The listing of released checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from vit_jax.interop.released import Released


def lines(found: Iterable[Released]) -> Iterator[str]:
    """Two lines for each checkpoint, its name and its facts, below the page they are from."""
    for source, members in groupby(found, lambda one: one.source):
        yield source
        for one in members:
            yield f'  {one.name}'
            yield f'    {_facts(one)}'.rstrip()


def _facts(one: Released) -> str:
    model = f'{one.model["name"]} {one.model["variant"]}' if one.model else ''
    count = f'{one.parameters / 1e6:,.1f} M' if one.parameters else ''
    size = f'{one.image_size} px' if one.image_size else ''
    result = '' if one.accuracy is None else f'{one.accuracy} {one.metric}'
    return f'{model:<19}{count:>9}{size:>8}  {one.trained_on:<32}{result}'
