"""Transforms of pairs of sentences, the records {source, target} of text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms.registry import transform
from vit_jax.data.vocabulary import EOS, Tokenizer

SIDES = ('source', 'target')
Apply = Callable[[Record], Record]


@transform
def lower() -> Apply:
    """Write both sides in lower case."""

    def apply(record: Record) -> Record:
        return record | {side: record[side].lower() for side in SIDES}

    return apply


@transform
def swap() -> Apply:
    """Translate the other way round: the target becomes the source."""

    def apply(record: Record) -> Record:
        return record | {'source': record['target'], 'target': record['source']}

    return apply


@transform
def tokenize(max_len: int | None = None, *, vocab: Tokenizer | None = None) -> Apply:
    """Make ids of both sides, int32 [n], the end as their last.

    Args:
      max_len: sentences of more ids, the end counted, are cut; None leaves them as they are.
      vocab: that of `config.data.vocab`.
    """
    if vocab is None:
        raise ValueError('there is no vocabulary: set config.data.vocab')
    if max_len is not None and max_len < 2:
        raise ValueError(f'max_len={max_len}: must be at least 2')
    keep = None if max_len is None else max_len - 1

    def apply(record: Record) -> Record:
        ids = {side: vocab.encode(record[side])[:keep] for side in SIDES}
        return record | {side: np.append(x, np.int32(EOS)) for side, x in ids.items()}

    return apply
