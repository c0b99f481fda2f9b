"""Reading and writing checkpoint files as named arrays: .npz and .safetensors.

PyTorch's files are read too, see `torch_files`; nothing that a pickle could run is ever run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import safetensors.numpy as safetensors

from vit_jax.errors import UserError, with_secrets
from vit_jax.interop import hub, torch_files
from vit_jax.interop.hub import (
    INDEX,
    OPEN_CLIP,
    OPEN_CLIP_WEIGHTS,
    PICKLES,
    TOKENIZERS,
    WEIGHTS,
)
from vit_jax.storage import cache, paths, servers
from vit_jax.storage.model_ref import ModelRef

Flat = dict[str, np.ndarray]  # name -> array
TOKENIZER = 'file of the tokenizer'  # key in the config

CONFIG = 'config.json'
_PREPROCESSOR, _PROCESSOR = 'preprocessor_config.json', 'processor_config.json'
# Prefixes of the parameters in a training state; the first match is used.
_PARAMS = ('params/', 'opt/target/', 'optimizer/target/')
# Limits of the unpacked size and of JSON files, so that no file can exhaust the memory.
_MAX_BYTES, _MAX_RATIO = 64 * 2**20, 20
_MAX_JSON = 16 * 2**20
_MAX_NAME = 200  # characters
_FLOATS = ('float16', 'bfloat16', 'float32', 'float64')
# Integer tables and counters next to weights, which families ignore.
_BUFFER = re.compile(r'(ids|idxs|index|mask|tracked|step)$')
# Keys of transformers configs that describe quantization.
_QUANTIZED = ('quantization_config', 'compression_config')
EXPLICIT = 'transformers_weights'  # key of config.json that names the file of the weights
_REPOSITORY = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?')


def read_arrays(path: str | os.PathLike[str]) -> tuple[Flat, dict[str, Any]]:
    """Read the arrays of a checkpoint as float32, and the parsed config.json next to it.

    Raises:
      UserError: see `read_stored`; also for quantized weights.
    """
    flat, config = read_stored(path)
    return _weights(flat, ModelRef.parse(path).file), config


def read_stored(path: str | os.PathLike[str]) -> tuple[Flat, dict[str, Any]]:
    """Read the arrays of a checkpoint in the precision of the file, and the parsed config.json.

    The config also has, if the files do: 'preprocessor_config.json', that file or its part of
    processor_config.json; 'pretrained_cfg', timm's image settings; and `TOKENIZER`, the path of the
    tokenizer's file.

    Args:
      path: An .npz file, where `FILE.npz:SUBTREE` selects a part; a .safetensors file; a folder
        with model.safetensors, single or in shards; a .pth, .pt, .bin or .ckpt file of PyTorch; or
        a URL, see `local_path`. Only the parameters of a training state in an .npz file are read.

    Returns:
      Arrays by '/'-joined names for .npz files, by '.'-joined names otherwise; and the config,
      empty if there is none.

    Raises:
      UserError: if there is no such file or part; if it is damaged, pickled or quantized; or if a
        package for reading it is missing.
    """
    ref = ModelRef.parse(path)
    path, (url, part) = ref.file, ref.locate()
    file = local_path(url)
    if file.endswith('.npz'):
        return _select(_parameters(_read_npz(file)), part, path), {}
    if file.endswith('.safetensors'):
        config = _read_configs(os.path.dirname(file))
        return _read_safetensors(file), config
    if file.endswith(torch_files.SUFFIXES):
        with paths.intact(path), _open(file) as opened:
            return torch_files.read(path, opened), _read_configs(os.path.dirname(file))
    if file.endswith(PICKLES):
        raise UserError(
            f'{path}: pickled objects can run code and are not supported; '
            'save the arrays as .safetensors or .npz'
        )
    if Path(file).is_dir():
        return _read_folder(file)
    if not Path(file).exists():
        raise UserError(f'{path}: there is no such file or folder{path_hint(path)}')
    raise UserError(f'{path}: not a checkpoint; specify an .npz or .safetensors file, or a folder')


def read_beside(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read the configs and tokenizers next to a .safetensors file or in a folder.

    Raises:
      UserError: see `read_stored`.
    """
    file = Path(local_path(ModelRef.parse(path).locate()[0]))
    folder = file if file.is_dir() else file.parent
    return {name: paths.read_bytes(p) for name in hub.BESIDE if (p := folder / name).is_file()}


def write_npz(path: str | os.PathLike[str], flat: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file atomically.

    Raises:
      UserError: if the file cannot be written.
    """
    # np.savez would append .npz to the temporary name.
    with _replace_file(Path(path)) as temporary, zipfile.ZipFile(temporary, 'w') as archive:
        for name, array in flat.items():
            with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def write_rows(
    archive: zipfile.ZipFile, name: str, count: int, chunks: Iterable[np.ndarray]
) -> None:
    """Write an array to an .npz file like `numpy.savez`, chunk by chunk.

    Args:
      archive: .npz file.
      name: Name of the array.
      count: Number of rows.
      chunks: Rows in order; at least one chunk, which determines dtype and shape.
    """
    chunks = iter(chunks)
    first_chunk = next(chunks)
    descr, shape = np.lib.format.dtype_to_descr(first_chunk.dtype), (count, *first_chunk.shape[1:])
    header = {'descr': descr, 'fortran_order': False, 'shape': shape}
    entry = zipfile.ZipInfo(f'{name}.npy')  # with a constant time
    with archive.open(entry, 'w', force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for chunk in itertools.chain([first_chunk], chunks):
            member.write(np.ascontiguousarray(chunk).data)


def write_safetensors(
    path: str | os.PathLike[str],
    flat: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    preprocessor: Mapping[str, Any] | None = None,
    others: Mapping[str, bytes] | None = None,
    weights: str = '',
) -> None:
    """Write a .safetensors file, or a folder with one, and its configs.

    Args:
      path: File or folder.
      flat: Arrays by name.
      config, preprocessor: Contents of config.json and preprocessor_config.json.
      others: Contents of further files by name.
      weights: Name of the file in a folder, if it is not `hub.WEIGHTS`.

    Raises:
      UserError: if a file cannot be written.
    """
    file = Path(path)
    if file.suffix != '.safetensors':
        file = file / (weights or WEIGHTS)
    # The format stores raw memory and loses transposed strides.
    arrays = {name: np.asarray(array, order='C') for name, array in flat.items()}
    for name, content in ((CONFIG, config), (_PREPROCESSOR, preprocessor)):
        if content is not None:
            with _replace_file(file.with_name(name)) as temporary:
                temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')
    for name, data in (others or {}).items():
        with _replace_file(file.with_name(name)) as temporary:
            temporary.write_bytes(data)
    # Last, so that there are never arrays without their config.
    with _replace_file(file) as temporary:
        safetensors.save_file(arrays, temporary, metadata={'format': 'pt'})


def _read_npz(path: str) -> Flat:
    with _check_readable(path), _open(path) as file:
        # Check first, since NumPy takes any other file for a pickle.
        if not zipfile.is_zipfile(file):
            raise UserError(f'{path}: not an .npz file, or truncated; download it again')
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            members = archive.zip.infolist()
            unpacked = sum(member.file_size for member in members)
            if unpacked > max(_MAX_BYTES, _MAX_RATIO * file.seek(0, os.SEEK_END)):
                raise UserError(f'{path}: unpacks to {unpacked:,} bytes, far more than its size')
            stems = [m.filename.removesuffix('.npy') for m in members if _is_array(m.filename)]
            # With .npy, since NumPy would prefer a member without this suffix.
            return {name: archive[f'{name}.npy'] for name in stems}


def _is_array(member: str) -> bool:
    """Return whether a member of an archive is an array, not a README, folder or desktop file."""
    return member.endswith('.npy') and not member.rpartition('/')[2].startswith('._')


def _read_safetensors(path: str) -> Flat:
    _open(path).close()
    with paths.intact(path):
        try:
            flat: Flat = safetensors.load_file(path)
        except AttributeError as error:  # a type that NumPy lacks
            raise UserError(
                f'{path}: has an unsupported type of numbers: {_first_line(error)}; '
                'save them as float32 or bfloat16'
            ) from None
    return flat


def _read_folder(folder: str) -> tuple[Flat, dict[str, Any]]:
    """Read the file that transformers reads, or all shards of its index.

    This is the file that config.json names, else the single file, else the index, which may be
    outdated if there is a single file. Variants, such as model.fp16.safetensors, are only read by
    name. If there is none of these, OpenCLIP's file is read.
    """
    config = _read_configs(folder)
    candidates = (
        name for name in (WEIGHTS, INDEX, OPEN_CLIP_WEIGHTS) if Path(folder, name).is_file()
    )
    file = config.get(EXPLICIT) or next(candidates, INDEX)
    if not (isinstance(file, str) and paths.stays_inside(file) and '://' not in file):
        raise UserError(
            f'{os.path.join(folder, CONFIG)}: {EXPLICIT} {file!r} is not a file in its folder'
        )
    if not file.endswith('.index.json'):
        return _read_safetensors(os.path.join(folder, file)), config
    index_path = os.path.join(folder, file)
    index = _read_json(index_path)
    if index is None:
        raise UserError(f'{folder}: the folder has neither {WEIGHTS} nor {file}')
    if not isinstance(index.get('weight_map'), dict):
        raise UserError(f'{index_path}: has no weight_map; download it again')
    flat: Flat = {}
    for shard in sorted({str(shard) for shard in index['weight_map'].values()}):
        if not paths.stays_inside(shard) or '://' in shard:
            raise UserError(f'{index_path}: {brief(shard)!r} is outside of its folder')
        flat |= _read_safetensors(os.path.join(folder, shard))
    if missing := sorted(index['weight_map'].keys() - flat.keys()):
        raise UserError(f'{folder}: {brief(missing[0])} is listed in {file} but is not in any file')
    return flat, config


def brief(name: str) -> str:
    """Shorten a long name for a message, as in damaged files."""
    return name if len(name) <= _MAX_NAME else f'{name[:_MAX_NAME]}...'


def _read_configs(folder: str) -> dict[str, Any]:
    config = _read_json(os.path.join(folder, CONFIG)) or {}
    _require_unquantized(config, os.path.join(folder, CONFIG))
    if 'pretrained_cfg' not in config and {'mean', 'std'} <= config.keys():
        config = config | {'pretrained_cfg': config}  # timm's old format
    # Since version 5, transformers stores all processors of a model in one file.
    nested = (_read_json(os.path.join(folder, _PROCESSOR)) or {}).get('image_processor')
    preprocessor = nested or _read_json(os.path.join(folder, _PREPROCESSOR))
    if not isinstance(preprocessor, dict | None):
        raise UserError(f'{os.path.join(folder, _PROCESSOR)}: image_processor is not a JSON object')
    tokenizers = [path for name in TOKENIZERS if Path(path := os.path.join(folder, name)).is_file()]
    further = {_PREPROCESSOR: preprocessor, TOKENIZER: tokenizers[0] if tokenizers else None}
    further[OPEN_CLIP] = _read_json(os.path.join(folder, OPEN_CLIP))
    return config | {key: value for key, value in further.items() if value is not None}


def _read_json(path: str) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if there is no such file."""
    try:
        with paths.open_file(path) as file:
            text = file.read(_MAX_JSON + 1)
        if len(text) > _MAX_JSON:
            raise UserError(f'{path}: more than {_MAX_JSON >> 20} MiB of JSON; download it again')
        content = paths.parse_json(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({_first_line(error)})') from None
    except ValueError as error:
        raise UserError(f'{path}: not valid JSON: {error}') from None
    if not isinstance(content, dict):
        raise UserError(f'{path}: is not a JSON object')
    return content


def _parameters(flat: Flat) -> Flat:
    """Return the parameters of a training state, or everything if it is none."""
    for prefix in _PARAMS:
        if part := _select_below(flat, prefix):
            return part
    return flat


def _select(flat: Flat, subtree: str, path: str) -> Flat:
    if not subtree:
        return flat
    if part := _select_below(flat, f'{subtree}/'):
        return part
    names = sorted({name.split('/')[0] for name in flat})
    raise UserError(f'{path}: the file has no {subtree!r} (it has: {", ".join(names)})')


def _select_below(flat: Flat, prefix: str) -> Flat:
    return {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}


def _weights(flat: Flat, path: str) -> Flat:
    """Convert all arrays to float32.

    Raises:
      UserError: if a member is not an array of real numbers, or has integers other than tables and
        counters: quantized weights are meaningless without their scales.
    """
    weights: Flat = {}
    for name, array in flat.items():
        if not isinstance(array, np.ndarray):  # NumPy returns bytes for other members
            raise UserError(f'{path}: {brief(name)} is not an array; download the file again')
        if array.dtype == np.dtype('V2'):  # NumPy's view of bfloat16
            array = array.view(ml_dtypes.bfloat16)
        kind = array.dtype.kind if array.dtype.name not in _FLOATS else 'f'
        is_wide = array.dtype.itemsize >= 4 or kind == 'b'
        if kind not in 'iubf':
            supported = ', '.join(_FLOATS)
            raise UserError(f'{path}: {brief(name)} has type {array.dtype}, not one of {supported}')
        if kind != 'f' and not (is_wide and (not array.ndim or _BUFFER.search(name))):
            raise UserError(
                f'{path}: {brief(name)} has type {array.dtype}, but weights must be '
                f'{", ".join(_FLOATS)}, not quantized; use the unquantized file, or save the '
                'numbers as float32'
            )
        with np.errstate(over='ignore'):  # infinite numbers are rejected later, with their names
            weights[name] = array.astype(np.float32, copy=False)
    return weights


def _require_unquantized(config: Mapping[str, Any], path: str) -> None:
    """Raise UserError if config.json, or its part for a tower, describes quantized weights."""
    parts = {'': config, **{k: v for k, v in config.items() if isinstance(v, dict)}}
    for key in _QUANTIZED:
        for name, part in parts.items():
            if quantization := part.get(key):
                method = (
                    quantization.get('quant_method')
                    if isinstance(quantization, dict)
                    else quantization
                )
                key_path = f'{name}.{key}' if name else key
                raise UserError(
                    f'{path}: {key_path}: quantized weights ({method}) are not supported; use the '
                    'unquantized checkpoint, or save the model dequantized'
                )


@contextlib.contextmanager
def _check_readable(path: str) -> Iterator[None]:
    """Extend `paths.intact` by an error for pickles."""
    try:
        with paths.intact(path):
            yield
    except UserError as error:
        if 'allow_pickle' in str(error.__cause__):
            raise UserError(
                f'{path}: has pickled objects, which can run code and are not supported; '
                'save plain arrays'
            ) from None
        raise


def _open(path: str) -> IO[bytes]:
    """Open a file for reading.

    Raises:
      UserError: if there is no such file, or it cannot be opened.
    """
    try:
        return paths.open_file(path)
    except FileNotFoundError:
        raise UserError(f'{path}: there is no such file{path_hint(path)}') from None
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: cannot be opened ({_first_line(error)})') from None


@contextlib.contextmanager
def _replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path`; remove it if writing fails."""
    try:
        paths.make_folder(path.parent)
        with paths.partial_file(path) as partial:
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(stat.S_IMODE(mode))  # safetensors makes files private
            paths.sync(partial)
            partial.replace(path)
            paths.sync(path.parent)
    except OSError as error:
        raise UserError(f'{path}: cannot be written ({_first_line(error)})') from None


def _first_line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__


def local_path(path: str) -> str:
    """Return the local file or folder of a checkpoint, downloaded once if it is remote.

    Raises:
      UserError: if there is no such file, or it cannot be downloaded or stored.
    """
    if hub.matches(path):
        return hub.fetch(path)
    if '://' not in path or path.endswith(hub.PICKLES):
        return path
    try:
        return _fetch(with_secrets(path))
    except cache.MissingFile as error:
        near = hub.nearest_released(path)
        raise UserError(f'{error}; did you mean {near}?' if near else str(error)) from None


def path_hint(path: str) -> str:
    """Return a hint at a similar path for messages about a missing path."""
    if near := hub.nearest_released(path):
        return f'; did you mean {near}?'
    if _REPOSITORY.fullmatch(path) and not pathlib.Path(path).parent.exists():
        return f'; on the Hugging Face Hub it would be {hub.SCHEME}{path}'
    return ''


def _fetch(url: str) -> str:
    """Download a file with the configs next to it, or a folder with weights."""
    parent, _, name = url.rstrip('/').rpartition('/')
    if name.endswith('.npz'):
        return str(cache.download(parent, [name], [name]) / name)
    if name.endswith('.safetensors'):
        return str(cache.download(parent, [*hub.CONFIGS, name], [name]) / name)
    parent, names = url.rstrip('/'), [*hub.CONFIGS, hub.INDEX]
    with contextlib.suppress(servers.Unreachable):  # there may be copies of shards
        single = cache.download(parent, [*hub.CONFIGS, hub.WEIGHTS], [])
        if (single / hub.WEIGHTS).is_file():  # as in `_read_folder`, even beside an old index
            return str(single)
    if (index := cache.download(parent, names, []) / hub.INDEX).is_file():
        return str(cache.download(parent, [*names, *(s := _shards(index, parent))], s))
    return str(cache.download(parent, [*hub.CONFIGS, hub.WEIGHTS], [hub.WEIGHTS]))


def _shards(index: pathlib.Path, url: str) -> list[str]:
    """Return the files listed in an index, all in its own folder."""
    try:
        shards = sorted(
            {str(name) for name in paths.parse_json(paths.read_bytes(index))['weight_map'].values()}
        )
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        raise UserError(f'{url}/{index.name}: has no weight_map; download it again') from None
    for name in shards:
        if not paths.stays_inside(name) or '/' in name:
            raise UserError(f'{url}/{index.name}: {name!r} is outside of its folder')
    return shards
