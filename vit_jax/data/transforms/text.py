"""Transforms of the texts of a record: pairs of sentences {source, target}, or a named field."""

from __future__ import annotations

import re
import string
from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms.registry import of_texts, transform
from vit_jax.data.vocabulary import PAD, Tokenizer, require_own_ids
from vit_jax.errors import UserError

SIDES = ('source', 'target')
Apply = Callable[[Record], Record]


@transform
@of_texts
def lower(*fields: str) -> Apply:
    """Write texts in lower case, by default both sides of a pair."""
    names = _names(fields) or SIDES

    def apply(record: Record) -> Record:
        return record | {name: _text(record, name).lower() for name in names}

    return apply


@transform
@of_texts
def canonicalize(*fields: str) -> Apply:
    """Write texts in lower case, without ASCII punctuation, and with single spaces.

    As the tokenizer of SigLIP does in transformers, and the evaluators of google-research/
    big_vision do with prompts.
    """
    names, punctuation = _names(fields) or SIDES, str.maketrans('', '', string.punctuation)

    def apply(record: Record) -> Record:
        texts = {name: _text(record, name).lower().translate(punctuation) for name in names}
        return record | {n: re.sub(r'\s+', ' ', text).strip() for n, text in texts.items()}

    return apply


@transform
@of_texts
def swap() -> Apply:
    """Swap source and target, to translate in the other direction."""

    def apply(record: Record) -> Record:
        return record | {'source': record['target'], 'target': record['source']}

    return apply


@transform
@of_texts
def tokenize(
    field: str | int | None = None,
    length: int | None = None,
    max_len: int | None = None,
    pad: int | str = PAD,
    *,
    vocab: Tokenizer | None = None,
) -> Apply:
    """Encode texts as ids, int32 [n], with the vocabulary's eos at the end.

    Args:
      field: the text to encode, for example 'caption'; by default both sides of a pair. A number
        is `max_len`.
      length: of the ids of a field: longer texts are cut, shorter ones padded, and the
        record gets `FIELD_mask`, bool [length], true for real ids.
      max_len: texts of more ids, eos included, are cut; None for no limit.
      pad: id behind the end, or 'eos' to repeat the end as SigLIP does, or 'pad' for the
        vocabulary's own.
      vocab: that of `config.data.vocab`. For pairs it has the special ids of `vit_jax vocab`.
    """
    if isinstance(field, int):
        field, max_len = None, field
    if vocab is None:
        raise ValueError('there is no vocabulary: set config.data.vocab')
    if length is not None and field is None:
        raise ValueError(f"{length=} is of a field: write tokenize('caption', {length})")
    max_len = max_len if length is None else length
    if max_len is not None and max_len < 2:
        name = 'max_len' if length is None else 'length'
        raise ValueError(f'{name}={max_len}: must be at least 2')
    if field is None:
        require_own_ids(vocab)
    own = {'pad': vocab.special[0], 'eos': vocab.special[2]}
    filler = own.get(pad, -1) if isinstance(pad, str) else pad
    if not 0 <= filler < len(vocab):
        has = f'has no {pad}' if pad in own else f'has {len(vocab)} ids'
        raise ValueError(f"{pad=}: the vocabulary {has}; write an id, 'eos' or 'pad'")
    eos, keep = own['eos'], None if max_len is None else max_len - 1
    names = SIDES if field is None else _names((field,))

    def apply(record: Record) -> Record:
        made: Record = {}
        for name in names:
            text = _text(record, name)
            if field is not None and not text.strip():
                raise UserError(f'the text {name!r} is empty: give it one, or leave the record out')
            ids = np.append(vocab.encode(text)[:keep], np.int32(eos))
            if length is not None:
                made[f'{name}_mask'] = np.arange(length) < len(ids)
                ids = np.pad(ids, (0, length - len(ids)), constant_values=filler)
            made[name] = ids
        return record | made

    return apply


def _names(fields: tuple[str, ...]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in fields):
        raise ValueError("needs the fields' names, for example 'caption'")
    return fields


def _text(record: Record, name: str) -> str:
    if not isinstance(record.get(name), str):
        raise UserError(f'there is no text {name!r}; the record has {", ".join(record)}')
    return record[name]
