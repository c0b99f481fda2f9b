"""Adapters of Hugging Face's `peft`: LoRA and DoRA, read merged into their model, and written.

A folder holds adapter_model.safetensors, with the matrices lora_A [rank, in] and lora_B [out, rank]
of each layer, and adapter_config.json, which names the model. Only the file of that model says what
its layers are, so that adapters of any family that is read can be.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.checkpoints import checkpointer
from vit_jax.config.load import from_dict, section
from vit_jax.config.run import Init, Lora
from vit_jax.errors import UserError
from vit_jax.interop import families, files, names
from vit_jax.interop.families import _transformers
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel
from vit_jax.optim import lora
from vit_jax.storage import paths, run_folder
from vit_jax.tree_paths import param_paths, unroll

WEIGHTS, CONFIG = 'adapter_model.safetensors', 'adapter_config.json'
_PREFIX = 'base_model.model.'
_MATRIX = re.compile(r'(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?')
_OF_CLASSES = ('id2label', 'label2id', 'num_labels', 'num_classes', 'label_names')
# The names of blocks in files of transformers, and in its models since version 5.
_IN_FILES, _IN_MODELS = 'encoder.layer.', 'layers.'


def read_merged(folder: str) -> tuple[Flat, dict[str, Any]]:
    """The arrays of the model that adapters belong to, with these merged, and its config.

    Raises:
      UserError: if they are of another kind, the model is not found, or it has other layers.
    """
    where = f'{folder}/{CONFIG}'
    try:
        config = paths.parse_json(paths.read_bytes(Path(where)))
    except ValueError as error:
        raise UserError(f'{where}: not valid JSON: {error}') from None
    if (kind := config.get('peft_type')) != 'LORA':
        raise UserError(f'{where}: adapters of type {kind!r} are not read, only LORA')
    if config.get('fan_in_fan_out') or config.get('lora_bias') or config.get('layer_replication'):
        raise UserError(f'{where}: fan_in_fan_out, lora_bias and layer_replication are not read')
    base = str(config.get('base_model_name_or_path'))
    beside = Path(folder, base)
    place = str(beside) if beside.exists() else base if Path(base).exists() else f'hf://{base}'
    try:
        flat, told = files.read_stored(place)
    except UserError as error:
        raise UserError(f'{where}: base_model_name_or_path: {error}') from None
    layers, whole = _layers(files.read_stored(f'{folder}/{WEIGHTS}')[0])
    before = {name: array.shape for name, array in flat.items()}
    known = {_ours(name.removesuffix('.weight')): name for name in flat if name.endswith('.weight')}
    for layer, matrices in layers.items():
        name = _found(f'{layer}.weight', flat, known, where)
        flat[name] = _merged(flat[name], layer, matrices, config)
    for name, array in whole.items():
        layer, _, leaf = name.rpartition('.')
        weight = _found(f'{layer}.weight', flat, known, where)
        flat[f'{weight.removesuffix("weight")}{leaf}'] = array
    heads = {name for name in before if flat[name].shape != before[name]}
    kept = {key: value for key, value in told.items() if not heads or key not in _OF_CLASSES}
    return {name: np.asarray(x, np.float32) for name, x in flat.items()}, kept


def _layers(flat: Flat) -> tuple[dict[str, Flat], Flat]:
    """The matrices of each adapted layer, and the arrays that are saved whole."""
    layers: dict[str, Flat] = {}
    whole: Flat = {}
    for name, array in flat.items():
        name = name.removeprefix(_PREFIX)
        if match := _MATRIX.fullmatch(name):
            layers.setdefault(match[1], {})[match[2]] = np.asarray(array, np.float32)
        else:
            whole[name] = array
    return layers, whole


def _ours(layer: str) -> str:
    """One name for a layer of a ViT in files of transformers and in its models."""
    start = min((i for part in (_IN_FILES, _IN_MODELS) if (i := layer.find(part)) >= 0), default=-1)
    return (start >= 0 and names.ours(layer[start:], _transformers.VIT_TABLE)) or layer


def _found(name: str, flat: Flat, known: Mapping[str, str], where: str) -> str:
    """The name of an array in the model's file."""
    if name in flat:
        return name
    if (ours := _ours(name.removesuffix('.weight'))) not in known:
        raise UserError(f'{where}: {name} is adapted, and the model has no such array')
    return known[ours]


def _merged(
    weight: np.ndarray, layer: str, matrices: Flat, config: Mapping[str, Any]
) -> np.ndarray:
    """A weight [out, in, ...] with its adapter."""
    rank = _option(config, 'rank_pattern', layer, config.get('r', 8))
    alpha = _option(config, 'alpha_pattern', layer, config.get('lora_alpha', 8))
    scale = alpha / (rank**0.5 if config.get('use_rslora') else rank)
    a, b = (x.reshape(len(x), -1) for x in (matrices['lora_A'], matrices['lora_B']))
    flat = np.asarray(weight, np.float32).reshape(len(weight), -1) + scale * (b @ a)
    if (magnitude := matrices.get('lora_magnitude_vector')) is not None:
        flat *= magnitude.reshape(-1, 1) / np.linalg.norm(flat, axis=1, keepdims=True)
    return flat.reshape(weight.shape)


def _option(config: Mapping[str, Any], key: str, layer: str, default: float) -> float:
    """A number that patterns of layers may replace, as in `peft`."""
    given = config.get(key) or {}
    found = (n for pattern, n in given.items() if re.fullmatch(rf'(.*\.)?({pattern})', layer))
    return next(found, default)


def write(imported: TrainedModel, place: str) -> tuple[str, ...]:
    """Write the adapters of a run (`config.lora`) for `peft`.

    Layers have their names in models of transformers since version 5.

    Args:
      imported: the run's model, with its adapters merged.
      place: the folder to write.

    Returns:
      Notes for people.

    Raises:
      UserError: if it is no such run, transformers has no such model, or the folder has adapters.
    """
    if (Path(place) / WEIGHTS).exists():
        raise UserError(f'{place}/{WEIGHTS} already exists: choose another name or remove it')
    folder = imported.path / run_folder.CHECKPOINTS
    if imported.step is None:
        raise UserError(f'{imported.path}: only runs have adapters (config.lora) to write')
    _, variables, meta = checkpointer.load_variables(folder, imported.step)
    config = from_dict(dict(meta['config']))
    options = section(config, Lora)
    if not options.rank:
        raise UserError(f'{imported.path}: only runs of config.lora have adapters to write')
    own = unroll(param_paths(variables['params']))
    placed, modules = _names(imported, own)
    arrays = {_PREFIX + name: array for name, array in _matrices(own, placed).items()}
    saved = {path: name for path, name in modules.items() if not lora.LEAF.search(path)}
    written = families.writer(str(imported.settings.model.name), ['transformers'])(
        _unrolled(imported)
    )
    arrays |= {_PREFIX + _in_models(name): written.arrays[name] for name in saved.values()}
    base, notes = _base(str(section(config, Init).checkpoint))
    told = {
        'peft_type': 'LORA',
        'base_model_name_or_path': base,
        'r': options.rank,
        'lora_alpha': options.rank if options.alpha is None else options.alpha,
        'target_modules': sorted(set(placed.values())),
        'modules_to_save': sorted({_in_models(n).rpartition('.')[0] for n in saved.values()}),
        'use_dora': options.dora,
        'bias': 'none',
        'inference_mode': True,
    }
    others = {CONFIG: (json.dumps(told, indent=2) + '\n').encode()}
    files.write_safetensors(Path(place) / WEIGHTS, arrays, others=others)
    return notes


def _unrolled(imported: TrainedModel) -> TrainedModel:
    flat = unroll(param_paths(imported.params))
    return dataclasses.replace(imported, params=traverse_util.unflatten_dict(flat, sep='/'))


def _names(imported: TrainedModel, own: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Names in transformers, found by writing a model whose arrays are filled with numbers.

    Returns:
      The layer of each adapter, by its path up to its leaf; and the array of each other parameter.
    """
    unrolled = _unrolled(imported)
    flat = {path: np.zeros(x.shape, np.float32) for path, x in param_paths(unrolled.params).items()}
    numbers: dict[float, str] = {}
    for path in own:
        above, _, _ = path.rpartition('/')
        key = above if lora.LEAF.search(path) else path
        if key in numbers.values():
            continue
        number = float(len(numbers) + 1)
        numbers[number] = key
        if key == path:
            flat[path][...] = number
            continue
        kernel, _, part = above.partition(f'/{lora.LORA}/')
        found = {p.name: p for _, p in lora.parts(f'{kernel}/kernel', flat[f'{kernel}/kernel'])}
        index = (slice(None), *(() if found[part].number is None else (found[part].number,)))
        flat[f'{kernel}/kernel'][index] = number
    tagged = dataclasses.replace(unrolled, params=traverse_util.unflatten_dict(flat, sep='/'))
    arrays = families.writer(str(imported.settings.model.name), ['transformers'])(tagged).arrays
    theirs = {
        float(array.flat[0]): name
        for name, array in arrays.items()
        if array.size and (array == array.flat[0]).all()
    }
    if lost := sorted(key for number, key in numbers.items() if number not in theirs):
        raise UserError(f'{imported.path}: transformers has no single array for {lost[0]}')
    named = {key: theirs[number] for number, key in numbers.items()}
    adapted = {k: n for k, n in named.items() if f'/{lora.LORA}/' in k}
    placed = {k: _in_models(n).removesuffix('.weight') for k, n in adapted.items()}
    return placed, {k: n for k, n in named.items() if k not in placed}


def _in_models(name: str) -> str:
    """The name of an array of transformers' files in its models since version 5."""
    start, (layer, _, leaf) = name.find(_IN_FILES), name.rpartition('.')
    if start < 0 or not (ours := names.ours(layer[start:], _transformers.VIT_TABLE)):
        return name
    rows = tuple(row for row in _transformers.VIT_TABLE if row[0].startswith(_IN_MODELS))
    return f'{name[:start]}{names.theirs(ours, rows) or layer[start:]}.{leaf}'


def _matrices(own: Mapping[str, Any], placed: Mapping[str, str]) -> Flat:
    """lora_A, lora_B and the magnitudes, from ours [in... rank], [rank out...] and [out...]."""
    found: Flat = {}
    for place, layer in placed.items():
        a, b = (np.asarray(own[f'{place}/{leaf}'], np.float32) for leaf in ('a', 'b'))
        found[f'{layer}.lora_A.weight'] = a.reshape(-1, a.shape[-1]).T
        found[f'{layer}.lora_B.weight'] = b.reshape(len(b), -1).T
        if (magnitude := own.get(f'{place}/magnitude')) is not None:
            found[f'{layer}.lora_magnitude_vector'] = np.asarray(magnitude, np.float32).reshape(-1)
    return found


def _base(path: str) -> tuple[str, tuple[str, ...]]:
    """The checkpoint that a run adapts, as `peft` names it."""
    if path.startswith('hf://'):
        return path.removeprefix('hf://'), ()
    folder = paths.absolute(path)
    if (folder / files.CONFIG).is_file():
        return str(folder), ()
    note = f'{CONFIG} names {path}, which peft reads once it is converted to a folder'
    return str(path), (note,)
