"""Transforms of texts, pairs of sentences {source, target} or named fields, and of annotations."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Callable

import numpy as np

from vit_jax.data.records import OBJECTS, Record
from vit_jax.data.transforms.geometry import check_objects
from vit_jax.data.transforms.pillow import check_positive
from vit_jax.data.transforms.registry import annotation_transform, text_transform, transform
from vit_jax.data.vocabulary import PAD, Tokenizer, require_standard_ids
from vit_jax.errors import UserError
from vit_jax.ops import panoptic

SIDES = ('source', 'target')
Apply = Callable[[Record], Record]
log = logging.getLogger(__name__)


@transform
@text_transform
def lower(*fields: str) -> Apply:
    """Convert texts to lower case, by default both sides of a pair."""
    names = _names(fields) or SIDES

    def apply(record: Record) -> Record:
        return record | {name: _text(record, name).lower() for name in names}

    return apply


@transform
@text_transform
def canonicalize(*fields: str) -> Apply:
    """Convert texts to lower case with single spaces and without ASCII punctuation.

    SigLIP's tokenizer in transformers does this, and the evaluators of google-research/big_vision
    do it with prompts.
    """
    names, punctuation = _names(fields) or SIDES, str.maketrans('', '', string.punctuation)

    def apply(record: Record) -> Record:
        texts = {name: _text(record, name).lower().translate(punctuation) for name in names}
        return record | {n: re.sub(r'\s+', ' ', text).strip() for n, text in texts.items()}

    return apply


@transform
@text_transform
def swap() -> Apply:
    """Swap source and target, to translate in the other direction."""

    def apply(record: Record) -> Record:
        return record | {'source': record['target'], 'target': record['source']}

    return apply


@transform
@annotation_transform
def first_words(field: str, count: int, to: str) -> Apply:
    """Copy the first `count` words of a text to another field, as a shorter caption."""
    check_positive(count=count)

    def apply(record: Record) -> Record:
        return record | {to: ' '.join(_text(record, field).split()[:count])}

    return apply


@transform
@annotation_transform
def sample_text(*fields: str) -> Callable[[Record, np.random.Generator], Record]:
    """Draw one of several texts, such as captions of several lengths, as the first field.

    Raises:
      ValueError: unless two fields or more are given.
    """
    if len(_names(fields)) < 2:
        raise ValueError("needs two fields or more, for example sample_text('caption', 'long')")

    def apply(record: Record, rng: np.random.Generator) -> Record:
        texts = [_text(record, field) for field in fields]
        return record | {fields[0]: texts[rng.integers(len(texts))]}

    return apply


@transform
@text_transform
def tokenize(
    field: str | int | None = None,
    length: int | None = None,
    max_len: int | None = None,
    pad: int | str = PAD,
    end: bool = True,
    *,
    vocab: Tokenizer | None = None,
) -> Apply:
    """Encode texts as ids, int32 [n].

    Args:
      field: Text to encode, such as 'caption'; by default both sides of a pair. A number is taken
        as `max_len`.
      length: Number of ids of a field: longer texts are truncated, shorter ones padded, and the
        record gets `FIELD_mask`, bool [length], true for real ids.
      max_len: Most ids of a text, including eos, before it is truncated; None for no limit.
      pad: Id after the end; 'eos' to repeat the end like SigLIP, or 'pad' for the vocabulary's
        padding id.
      end: Whether texts end with the vocabulary's eos.
      vocab: `config.data.vocab`. For pairs it needs the special ids of `vit_jax vocab`.

    Raises:
      ValueError: without a vocabulary, for a `length` without `field`, or for numbers out of range.
    """
    if isinstance(field, int):
        field, max_len = None, field
    if vocab is None:
        raise ValueError('missing vocabulary: set config.data.vocab')
    if length is not None and field is None:
        raise ValueError(f"{length=} needs a field: write tokenize('caption', {length})")
    max_len = max_len if length is None else length
    if max_len is not None and max_len < 2:
        name = 'max_len' if length is None else 'length'
        raise ValueError(f'{name}={max_len}: must be at least 2')
    if field is None:
        require_standard_ids(vocab)
    fillers = {'pad': vocab.special[0], 'eos': vocab.special[2]}
    filler = fillers.get(pad, -1) if isinstance(pad, str) else pad
    if not 0 <= filler < len(vocab):
        has = f'has no {pad}' if pad in fillers else f'has {len(vocab)} ids'
        raise ValueError(f"{pad=}: the vocabulary {has}; write an id, 'eos' or 'pad'")
    last = np.array([fillers['eos']][: int(end)], np.int32)
    keep = None if max_len is None else max_len - len(last)
    names = SIDES if field is None else _names((field,))

    def apply(record: Record) -> Record:
        encoded: Record = {}
        for name in names:
            text = _text(record, name)
            if field is not None and not text.strip():
                raise UserError(f'the text {name!r} is empty: write one, or remove the record')
            ids = np.append(vocab.encode(text)[:keep], last)
            if length is not None:
                encoded[f'{name}_mask'] = np.arange(length) < len(ids)
                ids = np.pad(ids, (0, length - len(ids)), constant_values=filler)
            encoded[name] = ids
        return record | encoded

    return apply


def _names(fields: tuple[str, ...]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in fields):
        raise ValueError("needs the fields' names, for example 'caption'")
    return fields


def _text(record: Record, name: str) -> str:
    if not isinstance(record.get(name), str):
        raise UserError(f'text {name!r} is missing; the record has {", ".join(record)}')
    return record[name]


@transform
@annotation_transform
def keep(*names: str) -> Callable[[Record], Record]:
    """Keep only the named fields of the record.

    Raises:
      ValueError: unless names are given.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("needs the fields' names, for example keep('image', 'label')")

    def apply(record: Record) -> Record:
        if missing := [name for name in names if name not in record]:
            raise UserError(f'{missing[0]!r} is missing; the record has {", ".join(record)}')
        return {name: record[name] for name in names}

    return apply


@transform
@annotation_transform
def pad_objects(count: int) -> Callable[[Record], Record]:
    """Pad every record to `count` objects for batching; must be the last transform.

    The arrays of `records.OBJECTS` are padded with zeros, and `object_mask`, bool [count], is
    true in the rows of objects. Objects beyond the first `count` are dropped, which is logged the
    first, tenth, hundredth time, and so on. A record without boxes, masks and segments is a
    UserError.
    """
    check_positive(count=count)
    cut = 0

    def apply(record: Record) -> Record:
        nonlocal cut
        if not {'boxes', 'masks', 'segments'} & record.keys():
            raise UserError(f'the record has no boxes or masks; it has {", ".join(record)}')
        check_objects(record)
        rows = {name: np.asarray(record[name]) for name in OBJECTS if name in record}
        number = len(next(iter(rows.values())))
        if number > count:
            cut += 1
            if str(cut).strip('0') == '1':
                message = 'pad_objects(%d): a record with %d objects is cut; %d so far'
                log.warning(message, count, number, cut)
        padded = {name: _pad_rows(array, count) for name, array in rows.items()}
        return {**record, **padded, 'object_mask': np.arange(count) < number}

    return apply


@transform
@annotation_transform
def number_masks() -> Callable[[Record], Record]:
    """Join the `masks` [N, H, W] of objects into `segments`, int16 [H, W]: 1 + the row of a pixel's
    object, the smallest of several, or 0 for none.

    Segments take one N-th of the masks' memory in a batch, and of the time of later transforms.
    Records with segments are unchanged; a record with neither is a UserError.
    """

    def apply(record: Record) -> Record:
        if 'segments' in record and 'masks' not in record:
            return record
        if 'masks' not in record:
            raise UserError(f'the record has no masks; it has {", ".join(record)}')
        fields = {name: value for name, value in record.items() if name != 'masks'}
        return {**fields, 'segments': panoptic.number(np.asarray(record['masks']) != 0)}

    return apply


def _pad_rows(array: np.ndarray, count: int) -> np.ndarray:
    padded = np.zeros((count, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array[:count]
    return padded
