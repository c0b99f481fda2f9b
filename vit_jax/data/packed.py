"""Format of packed data: examples in ArrayRecord shards, and the manifest next to them.

    OUT/manifest.json
    OUT/SPLIT-00000-of-00008.array_record
    OUT/SPLIT.labels.npy

A record is a MessagePack map: numbers, texts, arrays, and `image` as the bytes of a JPEG, PNG or
WebP file. It contains only data, no code.
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
_ARRAY = 1  # MessagePack extension type of arrays


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split.

    Attributes:
      name: File name in the manifest's folder.
      examples: Number of examples.
      size: File size in bytes.
      sha256: SHA-256 of the file.
    """

    name: str
    examples: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a folder of packed data.

    Attributes:
      source: Name of the packed data, such as `folder:/data/flowers`.
      options: Changes to the images, such as {'shorter_side': 512, 'quality': 92}, or empty.
      info: Facts about the classes.
      splits: {name: shards in order}.
    """

    source: str
    options: dict[str, int]
    info: SourceInfo
    splits: dict[str, tuple[Shard, ...]]

    def to_json(self) -> str:
        """Encode the manifest; inverse of `read_manifest`."""
        return json.dumps({'format': FORMAT, **dataclasses.asdict(self)}, indent=1)


def read_manifest(folder: paths.Path, read: Callable[[str], bytes], title: str) -> Manifest:
    """Read the manifest of a folder.

    Args:
      folder: Folder, for messages.
      read: Function that returns the content of a file in the folder.
      title: Name of the source, for messages.

    Raises:
      UserError: if the manifest is missing, or has a different format.
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
        raise UserError(f'{title}: {file} does not exist: write it with `vit_jax pack`') from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{title}: {file} is not a manifest of packed data: {error}') from error


def encode(record: Record) -> bytes:
    """Encode a record whose image is a file."""
    return msgpack.packb({name: _to_msgpack(value) for name, value in record.items()})


def decode(data: bytes) -> Record:
    """Decode a record whose image is a file.

    Raises:
      ValueError: if the bytes are not a record.
    """
    try:
        record = msgpack.unpackb(data, ext_hook=_from_msgpack)
    except (msgpack.UnpackException, TypeError, RecursionError) as error:
        raise ValueError(f'not a record ({error})') from error
    if not isinstance(record, dict):
        raise ValueError('not a record')
    return record


def _to_msgpack(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    content = value.dtype.str, value.shape, value.tobytes()
    return msgpack.ExtType(_ARRAY, msgpack.packb(content))


def _from_msgpack(code: int, data: bytes) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f'unknown extension type {code}')
    dtype, shape, content = msgpack.unpackb(data)
    return np.frombuffer(content, dtype).reshape(shape)
