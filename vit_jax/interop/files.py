"""Checkpoint files as named arrays: .npz and .safetensors, local or remote; never pickle."""

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
from vit_jax.interop import hub
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
# Prefixes of the parameters in a training state; the first one found is used.
_PARAMS = ('params/', 'opt/target/', 'optimizer/target/')
# Limits of the unpacked size and of a JSON file, so that no file can fill the memory.
_MOST_BYTES, _MOST_TIMES = 64 * 2**20, 20
_MOST_JSON = 16 * 2**20
_LONGEST_NAME = 200  # characters
_FLOATS = ('float16', 'bfloat16', 'float32', 'float64')
# Tables and counters, integers beside the weights, which families leave out.
_BUFFER = re.compile(r'(ids|index|mask|tracked|step)$')
# Keys under which configs of transformers say how weights were quantized.
_QUANTIZED = ('quantization_config', 'compression_config')
EXPLICIT = 'transformers_weights'  # a key of config.json that names the file of the weights
_REPOSITORY = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*(?:@[\w./-]+)?')


def read_arrays(path: str | os.PathLike[str]) -> tuple[Flat, dict[str, Any]]:
    """The arrays of a checkpoint, all as float32, and the parsed config.json beside it.

    Raises:
      UserError: as `read_stored`, and for quantized weights.
    """
    flat, config = read_stored(path)
    return _weights(flat, ModelRef.parse(path).file), config


def read_stored(path: str | os.PathLike[str]) -> tuple[Flat, dict[str, Any]]:
    """The arrays of a checkpoint in the precision of the file, and the parsed config.json.

    The config also holds, if the files do: under 'preprocessor_config.json', that file, or its part
    of processor_config.json; under 'pretrained_cfg', timm's description of images; under
    `TOKENIZER`, the path of a tokenizer's file.

    Args:
      path: an .npz file, of which `FILE.npz:SUBTREE` selects a part; a .safetensors file; a folder
        with model.safetensors, whole or in shards; or a URL, see `local_path`. Of a training
        state in an .npz file, only the parameters are read.

    Returns:
      Arrays by '/'-joined names in an .npz file, by '.'-joined names in the others; and the
      config, empty if there is none.

    Raises:
      UserError: if there is no such file or part; if it is damaged, holds pickled objects, or is
        quantized by its config; or if a package for reading it is missing.
    """
    ref = ModelRef.parse(path)
    path, file = ref.file, local_path(ref.url)
    if file.endswith('.npz'):
        return _select(_parameters(_read_npz(file)), ref.arrays, path), {}
    if file.endswith('.safetensors'):
        config = _read_configs(os.path.dirname(file))
        return _read_safetensors(file), config
    if file.endswith(PICKLES):
        raise UserError(
            f'{path}: pickled weights can run code and are not read; '
            'save them as .safetensors or .npz'
        )
    if Path(file).is_dir():
        return _read_folder(file)
    if not Path(file).exists():
        raise UserError(f'{path}: there is no such file or folder{path_hint(path)}')
    raise UserError(f'{path}: not a checkpoint; give an .npz or .safetensors file, or a folder')


def read_beside(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The contents of the configs and tokenizers beside a .safetensors file or in a folder.

    Raises:
      UserError: as `read_stored`.
    """
    file = Path(local_path(ModelRef.parse(path).url))
    folder = file if file.is_dir() else file.parent
    return {name: paths.read_bytes(p) for name in hub.BESIDE if (p := folder / name).is_file()}


def write_npz(path: str | os.PathLike[str], flat: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file, whole or not at all.

    Raises:
      UserError: if it cannot be written.
    """
    # Not np.savez: it appends .npz to the temporary name.
    with _replacing(Path(path)) as temporary, zipfile.ZipFile(temporary, 'w') as archive:
        for name, array in flat.items():
            with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def write_rows(
    archive: zipfile.ZipFile, name: str, count: int, chunks: Iterable[np.ndarray]
) -> None:
    """Write an array into an .npz as `numpy.savez` does, but without having it whole.

    Args:
      archive: the .npz.
      name: of the array.
      count: number of its rows.
      chunks: the rows in order; at least one chunk, which tells their dtype and shape.
    """
    chunks = iter(chunks)
    first = next(chunks)
    described, shape = np.lib.format.dtype_to_descr(first.dtype), (count, *first.shape[1:])
    header = {'descr': described, 'fortran_order': False, 'shape': shape}
    entry = zipfile.ZipInfo(f'{name}.npy')  # its time is always the same
    with archive.open(entry, 'w', force_zip64=True) as opened:
        np.lib.format.write_array_header_1_0(opened, header)
        for chunk in itertools.chain([first], chunks):
            opened.write(np.ascontiguousarray(chunk).data)


def write_safetensors(
    path: str | os.PathLike[str],
    flat: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    preprocessor: Mapping[str, Any] | None = None,
    others: Mapping[str, bytes] | None = None,
    weights: str = '',
) -> None:
    """Write a .safetensors file, or a folder with one, and the configs beside it.

    Args:
      path: the file or folder.
      flat: the arrays.
      config, preprocessor: contents of config.json and preprocessor_config.json.
      others: contents of further files, by their names.
      weights: name of the file in a folder, if it is not `hub.WEIGHTS`.

    Raises:
      UserError: if it cannot be written.
    """
    file = Path(path)
    if file.suffix != '.safetensors':
        file = file / (weights or WEIGHTS)
    # The format stores raw memory, so a transposed view would come back untransposed.
    arrays = {name: np.asarray(array, order='C') for name, array in flat.items()}
    for name, content in ((CONFIG, config), (_PREPROCESSOR, preprocessor)):
        if content is not None:
            with _replacing(file.with_name(name)) as temporary:
                temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')
    for name, data in (others or {}).items():
        with _replacing(file.with_name(name)) as temporary:
            temporary.write_bytes(data)
    # Last, so that arrays never lie there without their config.
    with _replacing(file) as temporary:
        safetensors.save_file(arrays, temporary, metadata={'format': 'pt'})


def _read_npz(path: str) -> Flat:
    with _readable(path), _open(path) as file:
        # Checked first, since NumPy takes any other file for a pickle.
        if not zipfile.is_zipfile(file):
            raise UserError(f'{path}: not an .npz file, or cut short; get it again')
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            members = archive.zip.infolist()
            unpacked = sum(member.file_size for member in members)
            if unpacked > max(_MOST_BYTES, _MOST_TIMES * file.seek(0, os.SEEK_END)):
                raise UserError(f'{path}: unpacks to {unpacked:,} bytes, far more than its size')
            stems = [m.filename.removesuffix('.npy') for m in members if _is_array(m.filename)]
            # With .npy, as NumPy would prefer a member whose name lacks it.
            return {name: archive[f'{name}.npy'] for name in stems}


def _is_array(member: str) -> bool:
    """Whether a member of an archive is an array, not a README, folder or desktop file."""
    return member.endswith('.npy') and not member.rpartition('/')[2].startswith('._')


def _read_safetensors(path: str) -> Flat:
    _open(path).close()
    with paths.intact(path):
        try:
            flat: Flat = safetensors.load_file(path)
        except AttributeError as error:  # of a type that NumPy lacks
            raise UserError(
                f'{path}: holds numbers of a type that is not read ({_line(error)}); '
                'save them as float32 or bfloat16'
            ) from None
    return flat


def _read_folder(folder: str) -> tuple[Flat, dict[str, Any]]:
    """The arrays of the file that transformers reads, or of all shards in its index.

    That is the file that config.json names, else the single file, else the index: an old index may
    be left beside a new file. Variants, such as model.fp16.safetensors, are read only by name. The
    file of OpenCLIP is read if there is none of these.
    """
    config = _read_configs(folder)
    held = (name for name in (WEIGHTS, INDEX, OPEN_CLIP_WEIGHTS) if Path(folder, name).is_file())
    file = config.get(EXPLICIT) or next(held, INDEX)
    if not (isinstance(file, str) and paths.stays_inside(file) and '://' not in file):
        raise UserError(
            f'{os.path.join(folder, CONFIG)}: {EXPLICIT} {file!r} is not a file of its folder'
        )
    if not file.endswith('.index.json'):
        return _read_safetensors(os.path.join(folder, file)), config
    place = os.path.join(folder, file)
    index = _read_json(place)
    if index is None:
        raise UserError(f'{folder}: there is neither {WEIGHTS} nor {file} in this folder')
    if not isinstance(index.get('weight_map'), dict):
        raise UserError(f'{place}: there is no weight_map in it; get it again')
    flat: Flat = {}
    for shard in sorted({str(shard) for shard in index['weight_map'].values()}):
        if not paths.stays_inside(shard) or '://' in shard:
            raise UserError(f'{place}: {brief(shard)!r} is outside of its folder')
        flat |= _read_safetensors(os.path.join(folder, shard))
    if lost := sorted(index['weight_map'].keys() - flat.keys()):
        raise UserError(f'{folder}: {brief(lost[0])} is listed in {file} but in none of the files')
    return flat, config


def brief(name: str) -> str:
    """A name for a message, cut short if it is long, as in damaged files."""
    return name if len(name) <= _LONGEST_NAME else f'{name[:_LONGEST_NAME]}...'


def _read_configs(folder: str) -> dict[str, Any]:
    config = _read_json(os.path.join(folder, CONFIG)) or {}
    _require_unquantized(config, os.path.join(folder, CONFIG))
    if 'pretrained_cfg' not in config and {'mean', 'std'} <= config.keys():
        config = config | {'pretrained_cfg': config}  # timm had it at the top once
    # As in transformers, which since version 5 keeps all processors of a model in one file.
    nested = (_read_json(os.path.join(folder, _PROCESSOR)) or {}).get('image_processor')
    preprocessor = nested or _read_json(os.path.join(folder, _PREPROCESSOR))
    if not isinstance(preprocessor, dict | None):
        raise UserError(f'{os.path.join(folder, _PROCESSOR)}: image_processor is not a JSON object')
    tokenizers = [path for name in TOKENIZERS if Path(path := os.path.join(folder, name)).is_file()]
    found = {_PREPROCESSOR: preprocessor, TOKENIZER: tokenizers[0] if tokenizers else None}
    found[OPEN_CLIP] = _read_json(os.path.join(folder, OPEN_CLIP))
    return config | {key: value for key, value in found.items() if value is not None}


def _read_json(path: str) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file."""
    try:
        with paths.open_file(path) as file:
            text = file.read(_MOST_JSON + 1)
        if len(text) > _MOST_JSON:
            raise UserError(f'{path}: more than {_MOST_JSON >> 20} MiB of JSON; get it again')
        content = paths.parse_json(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({_line(error)})') from None
    except ValueError as error:
        raise UserError(f'{path}: not valid JSON: {error}') from None
    if not isinstance(content, dict):
        raise UserError(f'{path}: does not hold a JSON object')
    return content


def _parameters(flat: Flat) -> Flat:
    """The parameters of a training state, or everything."""
    for prefix in _PARAMS:
        if part := _below(flat, prefix):
            return part
    return flat


def _select(flat: Flat, subtree: str, path: str) -> Flat:
    if not subtree:
        return flat
    if part := _below(flat, f'{subtree}/'):
        return part
    names = sorted({name.split('/')[0] for name in flat})
    raise UserError(f'{path}: there is no {subtree!r} in the file (it holds: {", ".join(names)})')


def _below(flat: Flat, prefix: str) -> Flat:
    return {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}


def _weights(flat: Flat, path: str) -> Flat:
    """All arrays as float32.

    Raises:
      UserError: if a member is not an array of real numbers, or there are integers other than
        tables and counters: quantized weights mean nothing without their scales.
    """
    weights: Flat = {}
    for name, array in flat.items():
        if not isinstance(array, np.ndarray):  # NumPy returns bytes of other members
            raise UserError(f'{path}: {brief(name)} is not an array; get the file again')
        if array.dtype == np.dtype('V2'):  # as NumPy reads bfloat16, which it lacks
            array = array.view(ml_dtypes.bfloat16)
        kind = array.dtype.kind if array.dtype.name not in _FLOATS else 'f'
        is_wide = array.dtype.itemsize >= 4 or kind == 'b'
        if kind not in 'iubf':
            known = ', '.join(_FLOATS)
            raise UserError(f'{path}: {brief(name)} holds {array.dtype}, not numbers of {known}')
        if kind != 'f' and not (is_wide and (not array.ndim or _BUFFER.search(name))):
            raise UserError(
                f'{path}: {brief(name)} holds {array.dtype}, but weights have to be '
                f'{", ".join(_FLOATS)}, not quantized; take the unquantized file, or save the '
                'numbers as float32'
            )
        with np.errstate(over='ignore'):  # infinite numbers are refused later, with their names
            weights[name] = array.astype(np.float32, copy=False)
    return weights


def _require_unquantized(config: Mapping[str, Any], path: str) -> None:
    """Raise UserError if config.json, or its part for a tower, is that of quantized weights."""
    parts = {'': config, **{k: v for k, v in config.items() if isinstance(v, dict)}}
    for key in _QUANTIZED:
        for name, part in parts.items():
            if told := part.get(key):
                method = told.get('quant_method') if isinstance(told, dict) else told
                place = f'{name}.{key}' if name else key
                raise UserError(
                    f'{path}: {place} says that the weights are quantized ({method}), which is not '
                    'read; take the unquantized checkpoint, or save the model dequantized'
                )


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """As `paths.intact`, with an error of its own for pickles."""
    try:
        with paths.intact(path):
            yield
    except UserError as error:
        if 'allow_pickle' in str(error.__cause__):
            raise UserError(
                f'{path}: holds pickled objects, which can run code and are not read; '
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
        raise UserError(f'{path}: cannot be opened ({_line(error)})') from None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which it then replaces; removed if writing fails."""
    try:
        paths.make_folder(path.parent)
        with paths.partial_file(path) as partial:
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(stat.S_IMODE(mode))  # safetensors creates a file only for its owner
            paths.sync(partial)
            partial.replace(path)
            paths.sync(path.parent)
    except OSError as error:
        raise UserError(f'{path}: cannot be written ({_line(error)})') from None


def _line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__


def local_path(path: str) -> str:
    """The local file or folder of a checkpoint, downloaded once if it is remote.

    Raises:
      UserError: if there is no such file, or it cannot be downloaded or kept.
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
    """A hint at the path that may be meant, for messages that there is no such path."""
    if near := hub.nearest_released(path):
        return f'; did you mean {near}?'
    if _REPOSITORY.fullmatch(path) and not pathlib.Path(path).parent.exists():
        return f'; on the Hugging Face Hub it would be {hub.SCHEME}{path}'
    return ''


def _fetch(url: str) -> str:
    """The local copy of a file, with the configs beside it, or of a folder with weights."""
    above, _, name = url.rstrip('/').rpartition('/')
    if name.endswith('.npz'):
        return str(cache.download(above, [name], [name]) / name)
    if name.endswith('.safetensors'):
        return str(cache.download(above, [*hub.CONFIGS, name], [name]) / name)
    above, names = url.rstrip('/'), [*hub.CONFIGS, hub.INDEX]
    with contextlib.suppress(servers.Unreachable):  # there may be copies of shards
        single = cache.download(above, [*hub.CONFIGS, hub.WEIGHTS], [])
        if (single / hub.WEIGHTS).is_file():  # as in `_read_folder`, even beside an old index
            return str(single)
    if (index := cache.download(above, names, []) / hub.INDEX).is_file():
        return str(cache.download(above, [*names, *(s := _shards(index, above))], s))
    return str(cache.download(above, [*hub.CONFIGS, hub.WEIGHTS], [hub.WEIGHTS]))


def _shards(index: pathlib.Path, url: str) -> list[str]:
    """The files that an index lists, all in its own folder."""
    try:
        shards = sorted(
            {str(name) for name in paths.parse_json(paths.read_bytes(index))['weight_map'].values()}
        )
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        raise UserError(f'{url}/{index.name}: there is no weight_map in it; get it again') from None
    for name in shards:
        if not paths.stays_inside(name) or '/' in name:
            raise UserError(f'{url}/{index.name}: {name!r} is outside of its folder')
    return shards
