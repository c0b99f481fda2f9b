"""Released checkpoints: a table of those that are known, and the short names of public buckets.

`augreg/NAME` is gs://vit_models/augreg/NAME.npz, whether the table has it or not. Every number in
the table is from the source that it names, but for parameters: where this package has the model,
they are counted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import pathlib
from typing import Any

TABLE = pathlib.Path(__file__).with_suffix('.json')
# The bucket of a short name, by its first folder.
BUCKETS = {
    **dict.fromkeys(('augreg', 'imagenet21k', 'imagenet21k+imagenet2012', 'sam'), 'vit_models'),
    **dict.fromkeys(('flexivit', 'siglip', 'siglip2', 'zoo'), 'big_vision'),
    'distill': 'bit_models',
}


@dataclasses.dataclass(frozen=True)
class Released:
    """A released checkpoint.

    Attributes:
      name: as `vit_jax.load` takes it.
      model: keywords of the model here, with its name and variant; None if they are not listed.
      parameters: their number; rounded where `model` is None; None if unknown.
      image_size: side in pixels; None for any size.
      trained_on: the data, in order.
      accuracy: in percent, of the published evaluation; None if the source gives none.
      metric: of the accuracy; empty without one. 'ImageNet' is top-1 of the checkpoint itself.
      source: the page with these facts.
    """

    name: str
    model: dict[str, Any] | None
    parameters: int | None
    image_size: int | None
    trained_on: str
    accuracy: float | None
    metric: str
    source: str


@functools.cache
def table() -> tuple[Released, ...]:
    """All checkpoints of the table, those of one source together."""
    groups = json.loads(TABLE.read_text())
    return tuple(Released(*[*row, source]) for source, rows in groups.items() for row in rows)


def url(path: str) -> str:
    """The address of a short name; any other path, and one that exists here, as it is."""
    name, colon, part = path.partition(':')
    bucket = BUCKETS.get(name.partition('/')[0])
    if bucket is None or '/' not in name or os.path.exists(path) or os.path.exists(name):
        return path
    return f'gs://{bucket}/{name.removesuffix(".npz")}.npz{colon}{part}'


def nearest(path: str) -> str:
    """The name in the table that is most like a path; empty if none is."""
    names = {one.name: None for one in table()}
    tail = path.rstrip('/').rpartition('/')[2].removesuffix('.npz')
    for name in names:
        whole = name.removesuffix(':img').removesuffix('.npz')
        if tail and whole.endswith(f'/{tail}'):
            return name
    wanted = path.removeprefix('gs://').removeprefix('vit_models/').removesuffix('.npz')
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    return near[0] if near else ''
