"""LoRA and DoRA adapters of Hugging Face's `peft`: read merged into their model, and written.

A folder holds adapter_model.safetensors, with the matrices lora_A [rank, in] and lora_B [out, rank]
of each layer, and adapter_config.json, which names the model. The layers are identified by the
model's file, so that adapters of any readable family can be read.
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
_CLASS_KEYS = ('id2label', 'label2id', 'num_labels', 'num_classes', 'label_names')
# Prefixes of blocks in files of transformers, and in its models since version 5.
_IN_FILES, _IN_MODELS = 'encoder.layer.', 'layers.'


def read_merged(folder: str) -> tuple[Flat, dict[str, Any]]:
    """Read the model of adapters with the adapters merged, and its config.

    Raises:
      UserError: if the adapters are of a different kind, or the model is not found or does not fit.
    """
    source = f'{folder}/{CONFIG}'
    try:
        config = paths.parse_json(paths.read_bytes(Path(source)))
    except ValueError as error:
        raise UserError(f'{source}: not valid JSON: {error}') from None
    if (kind := config.get('peft_type')) != 'LORA':
        raise UserError(f'{source}: adapters of type {kind!r} are not supported, only LORA')
    if config.get('fan_in_fan_out') or config.get('lora_bias') or config.get('layer_replication'):
        raise UserError(
            f'{source}: fan_in_fan_out, lora_bias and layer_replication are not supported'
        )
    base = str(config.get('base_model_name_or_path'))
    local = Path(folder, base)
    location = str(local) if local.exists() else base if Path(base).exists() else f'hf://{base}'
    try:
        flat, base_config = files.read_stored(location)
    except UserError as error:
        raise UserError(f'{source}: base_model_name_or_path: {error}') from None
    layers, saved = _layers(files.read_stored(f'{folder}/{WEIGHTS}')[0])
    before = {name: array.shape for name, array in flat.items()}
    weight_names = {
        _our_name(name.removesuffix('.weight')): name for name in flat if name.endswith('.weight')
    }
    for layer, matrices in layers.items():
        name = _find_weight(f'{layer}.weight', flat, weight_names, source)
        flat[name] = _merge(flat[name], layer, matrices, config)
    for name, array in saved.items():
        layer, _, leaf = name.rpartition('.')
        weight = _find_weight(f'{layer}.weight', flat, weight_names, source)
        flat[f'{weight.removesuffix("weight")}{leaf}'] = array
    heads = {name for name in before if flat[name].shape != before[name]}
    retained_config = {
        key: value for key, value in base_config.items() if not heads or key not in _CLASS_KEYS
    }
    return {name: np.asarray(x, np.float32) for name, x in flat.items()}, retained_config


def _layers(flat: Flat) -> tuple[dict[str, Flat], Flat]:
    """Split arrays into the matrices of each adapted layer and the fully saved arrays."""
    layers: dict[str, Flat] = {}
    saved: Flat = {}
    for name, array in flat.items():
        name = name.removeprefix(_PREFIX)
        if match := _MATRIX.fullmatch(name):
            layers.setdefault(match[1], {})[match[2]] = np.asarray(array, np.float32)
        else:
            saved[name] = array
    return layers, saved


def _our_name(layer: str) -> str:
    """Unify the names of a ViT layer in transformers' files and models."""
    start = min((i for part in (_IN_FILES, _IN_MODELS) if (i := layer.find(part)) >= 0), default=-1)
    return (start >= 0 and names.to_ours(layer[start:], _transformers.VIT_TABLE)) or layer


def _find_weight(name: str, flat: Flat, weight_names: Mapping[str, str], source: str) -> str:
    """Find the name of an array in the model's file."""
    if name in flat:
        return name
    if (key := _our_name(name.removesuffix('.weight'))) not in weight_names:
        raise UserError(f'{source}: {name} is adapted, but the model has no such array')
    return weight_names[key]


def _merge(weight: np.ndarray, layer: str, matrices: Flat, config: Mapping[str, Any]) -> np.ndarray:
    """Merge a weight [out, in, ...] with its adapter."""
    rank = _option(config, 'rank_pattern', layer, config.get('r', 8))
    alpha = _option(config, 'alpha_pattern', layer, config.get('lora_alpha', 8))
    scale = alpha / (rank**0.5 if config.get('use_rslora') else rank)
    a, b = (x.reshape(len(x), -1) for x in (matrices['lora_A'], matrices['lora_B']))
    flat = np.asarray(weight, np.float32).reshape(len(weight), -1) + scale * (b @ a)
    if (magnitude := matrices.get('lora_magnitude_vector')) is not None:
        flat *= magnitude.reshape(-1, 1) / np.linalg.norm(flat, axis=1, keepdims=True)
    return flat.reshape(weight.shape)


def _option(config: Mapping[str, Any], key: str, layer: str, default: float) -> float:
    """Return a number that patterns of layers may override, as in `peft`."""
    patterns = config.get(key) or {}
    matches = (n for pattern, n in patterns.items() if re.fullmatch(rf'(.*\.)?({pattern})', layer))
    return next(matches, default)


def write(imported: TrainedModel, folder_path: str) -> tuple[str, ...]:
    """Write the adapters of a run (`config.lora`) for `peft`.

    Layers are named as in models of transformers since version 5.

    Args:
      imported: Run's model, with its adapters merged.
      folder_path: Folder to write.

    Returns:
      Notes for the user.

    Raises:
      UserError: if the run has no adapters, transformers has no such model, or the folder has
        adapters.
    """
    if (Path(folder_path) / WEIGHTS).exists():
        raise UserError(f'{folder_path}/{WEIGHTS} already exists: choose another name or remove it')
    folder = imported.path / run_folder.CHECKPOINTS
    if imported.step is None:
        raise UserError(f'{imported.path}: only runs have adapters (config.lora) to write')
    _, variables, meta = checkpointer.load_variables(folder, imported.step)
    config = from_dict(dict(meta['config']))
    options = section(config, Lora)
    if not options.is_used:
        raise UserError(f'{imported.path}: only runs with config.lora have adapters to write')
    if options.method != 'lora':
        raise UserError(
            f'{imported.path}: only adapters of lora are written for peft, not of {options.method}'
        )
    adapter_params = unroll(param_paths(variables['params']))
    layers, modules = _names(imported, adapter_params)
    arrays = {_PREFIX + name: array for name, array in _matrices(adapter_params, layers).items()}
    saved = {path: name for path, name in modules.items() if not lora.LEAF.search(path)}
    written = families.writer(str(imported.settings.model.name), ['transformers'])(
        _unroll(imported)
    )
    arrays |= {_PREFIX + _name_in_models(name): written.arrays[name] for name in saved.values()}
    base, notes = _describe_base(str(section(config, Init).checkpoint))
    adapter_config = {
        'peft_type': 'LORA',
        'base_model_name_or_path': base,
        'r': options.rank,
        'lora_alpha': options.rank if options.alpha is None else options.alpha,
        'target_modules': sorted(set(layers.values())),
        'modules_to_save': sorted({_name_in_models(n).rpartition('.')[0] for n in saved.values()}),
        'use_dora': options.dora,
        'bias': 'none',
        'inference_mode': True,
    }
    extra_files = {CONFIG: (json.dumps(adapter_config, indent=2) + '\n').encode()}
    files.write_safetensors(Path(folder_path) / WEIGHTS, arrays, others=extra_files)
    return notes


def _unroll(imported: TrainedModel) -> TrainedModel:
    flat = unroll(param_paths(imported.params))
    return dataclasses.replace(imported, params=traverse_util.unflatten_dict(flat, sep='/'))


def _names(
    imported: TrainedModel, adapter_params: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Find names in transformers by writing a model whose arrays are filled with distinct numbers.

    Returns:
      The layer of each adapter, by its path without the leaf; and the array of each other
      parameter.
    """
    unrolled = _unroll(imported)
    flat = {path: np.zeros(x.shape, np.float32) for path, x in param_paths(unrolled.params).items()}
    numbers: dict[float, str] = {}
    for path in adapter_params:
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
        parts_by_name = {
            p.name: p for _, p in lora.parts(f'{kernel}/kernel', flat[f'{kernel}/kernel'])
        }
        index = (
            slice(None),
            *(() if parts_by_name[part].number is None else (parts_by_name[part].number,)),
        )
        flat[f'{kernel}/kernel'][index] = number
    tagged = dataclasses.replace(unrolled, params=traverse_util.unflatten_dict(flat, sep='/'))
    arrays = families.writer(str(imported.settings.model.name), ['transformers'])(tagged).arrays
    array_names = {
        float(array.flat[0]): name
        for name, array in arrays.items()
        if array.size and (array == array.flat[0]).all()
    }
    if missing := sorted(key for number, key in numbers.items() if number not in array_names):
        raise UserError(f'{imported.path}: transformers has no single array for {missing[0]}')
    names_by_key = {key: array_names[number] for number, key in numbers.items()}
    adapter_names = {k: n for k, n in names_by_key.items() if f'/{lora.LORA}/' in k}
    layers = {k: _name_in_models(n).removesuffix('.weight') for k, n in adapter_names.items()}
    return layers, {k: n for k, n in names_by_key.items() if k not in layers}


def _name_in_models(name: str) -> str:
    """Translate the name of an array in transformers' files to its models since version 5."""
    start, (layer, _, leaf) = name.find(_IN_FILES), name.rpartition('.')
    if start < 0 or not (our_name := names.to_ours(layer[start:], _transformers.VIT_TABLE)):
        return name
    rows = tuple(row for row in _transformers.VIT_TABLE if row[0].startswith(_IN_MODELS))
    return f'{name[:start]}{names.to_theirs(our_name, rows) or layer[start:]}.{leaf}'


def _matrices(adapter_params: Mapping[str, Any], layers: Mapping[str, str]) -> Flat:
    """Convert adapters to lora_A [rank in], lora_B [out rank] and magnitudes [out]."""
    matrices: Flat = {}
    for path, layer in layers.items():
        a, b = (np.asarray(adapter_params[f'{path}/{leaf}'], np.float32) for leaf in ('a', 'b'))
        matrices[f'{layer}.lora_A.weight'] = a.reshape(-1, a.shape[-1]).T
        matrices[f'{layer}.lora_B.weight'] = b.reshape(len(b), -1).T
        if (magnitude := adapter_params.get(f'{path}/magnitude')) is not None:
            matrices[f'{layer}.lora_magnitude_vector'] = np.asarray(magnitude, np.float32).reshape(
                -1
            )
    return matrices


def _describe_base(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the checkpoint that a run adapts, as `peft` names it, and notes."""
    if path.startswith('hf://'):
        return path.removeprefix('hf://'), ()
    folder = paths.absolute(path)
    if (folder / files.CONFIG).is_file():
        return str(folder), ()
    note = f'{CONFIG} names {path}, which peft can read after it is converted to a folder'
    return str(path), (note,)
