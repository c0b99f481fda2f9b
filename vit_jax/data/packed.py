"""The format of packed data: examples in ArrayRecord shards, and the manifest next to them.

    OUT/manifest.json
    OUT/SPLIT-00000-of-00008.array_record
    OUT/SPLIT.labels.npy

A record is a map in MessagePack: numbers, texts, arrays, and `image` as the bytes of a JPEG, PNG or
WebP file. It holds only data, no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.errors import UserError
from vit_jax.storage import paths

MANIFEST = 'manifest.json'
FORMAT = 1
_ARRAY = 1  # the extension type of arrays


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of a split.

    Attributes:
      name: name of the file in the folder of the manifest.
      examples: their number.
      size: of the file in bytes.
      sha256: of the file.
    """

    name: str
    examples: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a folder of packed data.

    Attributes:
      source: the data that were packed, as `folder:/data/flowers`.
      options: changes to the images: {'shorter_side': 512, 'quality': 92}, or empty.
      info: facts about the classes.
      splits: {name: shards in their order}.
    """

    source: str
    options: dict[str, int]
    info: SourceInfo
    splits: dict[str, tuple[Shard, ...]]

    def to_json(self) -> str:
        """Inverse of `read_manifest`."""
        return json.dumps({'format': FORMAT, **dataclasses.asdict(self)}, indent=1)


def read_manifest(folder: paths.Path, read: Callable[[str], bytes], title: str) -> Manifest:
    """Read the manifest of a folder.

    Args:
      folder: for messages.
      read: returns the content of a file of the folder.
      title: name of the source, for messages.

    Raises:
      UserError: if it is missing, or has another format.
    """
    file = folder / MANIFEST
    try:
        content = paths.parse_json(read(MANIFEST))
        if content['format'] != FORMAT:
            raise ValueError(f'format {content["format"]}, not {FORMAT}')
        facts: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in content['info'].items()}
        splits = {
            str(split): tuple(Shard(**shard) for shard in shards)
            for split, shards in content['splits'].items()
        }
        return Manifest(content['source'], content['options'], SourceInfo(**facts), splits)
    except FileNotFoundError as error:
        raise UserError(f'{title}: there is no {file}: write it by `vit_jax pack`') from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{title}: {file} is not a manifest of packed data: {error}') from error


def encode(record: Record) -> bytes:
    """Turn a record into bytes; its image is a file."""
    return msgpack.packb({name: _plain(value) for name, value in record.items()})


def decode(data: bytes) -> Record:
    """Turn bytes back into a record, whose image is a file.

    Raises:
      ValueError: if they are not a record.
    """
    try:
        record = msgpack.unpackb(data, ext_hook=_array)
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(f'no record ({error})') from error
    if not isinstance(record, dict):
        raise ValueError('no record')
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    content = value.dtype.str, value.shape, value.tobytes()
    return msgpack.ExtType(_ARRAY, msgpack.packb(content))


def _array(code: int, data: bytes) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f'a value of the unknown type {code}')
    dtype, shape, content = msgpack.unpackb(data)
    return np.frombuffer(content, dtype).reshape(shape)
