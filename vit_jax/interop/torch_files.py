"""PyTorch's files as named arrays, without PyTorch and without running their code.

A .pth, .pt or .ckpt file of PyTorch 1.6 or newer is a zip archive: `data.pkl` describes nested
containers, and each storage is a member of raw numbers. Unpickling can import and call anything;
here it may only make dicts and arrays, and every other object becomes an empty one.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError

Flat = dict[str, np.ndarray]
SUFFIXES = ('.pth', '.pt', '.ckpt', '.bin')
_STORAGES = {
    **{'FloatStorage': np.float32, 'DoubleStorage': np.float64, 'HalfStorage': np.float16},
    **{'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32},
    **{'ShortStorage': np.int16, 'CharStorage': np.int8, 'ByteStorage': np.uint8},
    'BoolStorage': np.bool_,
}
_MAX_PICKLE = 64 * 2**20  # bytes of the description, without the numbers


def read(path: str, file: Any) -> Flat:
    """Read the arrays of an open file; names of nested containers are joined by dots.

    A damaged archive can raise any exception.

    Raises:
      UserError: if the file is not such an archive.
    """
    if not zipfile.is_zipfile(file):
        raise UserError(
            f'{path}: not a file of PyTorch 1.6 or newer, or truncated: load it with torch and '
            'save its arrays as .safetensors'
        )
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith('data.pkl')]
        if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE:
            raise UserError(f'{path}: not a file of PyTorch: it has {len(names)} data.pkl')
        content = _Unpickler(archive, names[0].removesuffix('data.pkl')).load()
    return dict(_flatten(content))


def _flatten(content: Any, prefix: str = '') -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays below dicts, lists and modules, with their names."""
    if isinstance(content, np.ndarray):
        yield prefix, content
        return
    if isinstance(content, _Inert):
        content = content.state
    if isinstance(content, (list, tuple)):
        content = dict(enumerate(content))
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flatten(value, f'{prefix}.{key}' if prefix else str(key))


class _Inert:
    """Stands for any object of the file other than containers and arrays; does nothing."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the item."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    def append(self, item: Any) -> None:
        """Ignore the item."""

    def extend(self, items: Any) -> None:
        """Ignore the items."""


class _Unpickler(pickle.Unpickler):
    """Rebuilds the containers and arrays of an archive, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f'{root}data.pkl')))
        self._archive, self._root = archive, root
        self._storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ('collections', 'OrderedDict'):
            return OrderedDict
        if module == 'torch._utils' and name in ('_rebuild_tensor', '_rebuild_tensor_v2'):
            return _rebuild
        if module == 'torch._utils' and name == '_rebuild_parameter':
            return lambda data, *_: data
        if module == 'torch' and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        return _Inert

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, *_ = pid
        if not isinstance(dtype, np.dtype):
            raise ValueError('an unknown type of numbers')
        if key not in self._storages:
            numbers = self._archive.read(f'{self._root}data/{key}')
            self._storages[key] = np.frombuffer(numbers, dtype)
        return self._storages[key]


def _rebuild(
    storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> np.ndarray:
    """Make a tensor of a storage.

    Raises:
      ValueError: if it does not lie inside of the storage.
    """
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    fits = min((offset, *size, *stride)) >= 0 and last < len(storage)
    if math.prod(size) and not fits:
        raise ValueError('a tensor exceeds its storage')
    if not math.prod(size):
        return np.zeros(size, storage.dtype)
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()
