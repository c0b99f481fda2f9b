"""Images that two splits share, such as a file copied into training and validation."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Hashable, Mapping

import numpy as np

from vit_jax.data.records import BrokenRecord
from vit_jax.data.splits import Subset

LIMIT = 100_000  # files that are compared at the start of a run
_HEAD = 4096  # bytes, which tell most files of equal size apart
Pairs = list[tuple[str, str]]  # names of the training split's image and of the held-out one


def shared_files(train: Subset, held_out: Subset) -> Pairs:
    """Find held-out files with the same content as a training file.

    Files are compared by size, then by their first bytes, then as a whole. There are no pairs
    unless both splits consist of local files, at most LIMIT together.
    """
    if len(train) + len(held_out) > LIMIT or not (train.has_files and held_out.has_files):
        return []
    train_names, eval_names = _names(train), _names(held_out)
    if not all(os.path.isfile(name) for name in (*train_names[:1], *eval_names[:1])):
        return []
    with contextlib.suppress(OSError):  # reported when the run reads the file
        for key in (os.path.getsize, _head):
            keys = [{name: key(name) for name in side} for side in (train_names, eval_names)]
            shared_keys = set(keys[0].values()) & set(keys[1].values())
            train_names, eval_names = (
                [name for name in side if side[name] in shared_keys] for side in keys
            )
        return _match(
            *({name: _content(name) for name in side} for side in (train_names, eval_names))
        )
    return []


def shared_images(train: Subset, held_out: Subset) -> Pairs:
    """Find held-out images with the same pixels as a training image, by decoding all of them."""
    splits = (train, held_out)
    return _match(
        *({n: _pixels(split, i) for i, n in enumerate(_names(split))} for split in splits)
    )


def _names(split: Subset) -> list[str]:
    return [split.record_name(index) for index in range(len(split))]


def _match(train_names: Mapping[str, Hashable], eval_names: Mapping[str, Hashable]) -> Pairs:
    """Pair each evaluation file with a training file of the same key; None matches nothing."""
    ours_by_key = {key: name for name, key in train_names.items() if key is not None}
    return [(ours_by_key[key], name) for name, key in eval_names.items() if key in ours_by_key]


def _head(name: str) -> bytes:
    with open(name, 'rb') as file:
        return file.read(_HEAD)


def _content(name: str) -> bytes:
    with open(name, 'rb') as file:
        return hashlib.file_digest(file, 'blake2b').digest()


def _pixels(split: Subset, index: int) -> bytes | None:
    """Digest an example's image; None if it has none, or cannot be read."""
    with contextlib.suppress(BrokenRecord):
        image = split[index].get('image')
        if image is not None:
            array = np.ascontiguousarray(image)
            return hashlib.blake2b(repr(array.shape).encode() + array.tobytes()).digest()
    return None
