"""Checkpoints of other code bases, read and written by families, one per code base."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.data.images import MAX_PIXELS
from vit_jax.errors import UserError
from vit_jax.interop import families, files, names, normalization, preprocessing, texts
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written, read_class_names
from vit_jax.storage.model_ref import TOWERS, ModelRef
from vit_jax.tree_paths import param_paths, unroll

ADAPTERS = 'adapter_config.json'  # marks a folder of peft
# Key and value in transformers' config.json of a classifier of several labels.
_PROBLEM, _SEVERAL_LABELS = 'problem_type', 'multi_label_classification'


def read(
    path: str | os.PathLike[str],
    mean: Any = None,
    std: Any = None,
    image_size: tuple[int, int] | None = None,
) -> TrainedModel:
    """Read a checkpoint of another code base, in any format.

    Args:
      path: File, folder or URL, see `files.read_arrays`; with an optional family in front, see
        `families`, and one of two towers or models behind it, as in `FILE:vision` or
        `FILE:teacher`.
      mean, std: Normalization of its images in [0, 1], one number or one per channel; by default
        from the files.
      image_size: Height and width of the images that it will get. It is taken as the size that the
        model was made for if the files lack this size and the number of patches equals the number
        of positions.

    Raises:
      UserError: if the checkpoint cannot be read, or no family matches it.
    """
    ref = ModelRef.parse(path)
    note, family, place = '', ref.family, ref.place
    if os.path.isfile(os.path.join(ref.file, ADAPTERS)):
        from vit_jax.interop import peft

        flat, extra = peft.read_merged(ref.file)
    else:
        flat, extra = files.read_arrays(ref)
    if (mean is None) != (std is None):
        raise UserError('set mean and std together, or neither')
    if mean is not None:
        extra[normalization.GIVEN_NORMALIZATION] = {'mean': mean, 'std': std}
    if image_size:
        extra[GIVEN_SIZE] = image_size
    try:
        if ref.part in TOWERS:
            flat, extra = _take_tower(flat, extra, ref.part)
        elif ref.part:
            flat = names.select_part(flat, ref.part)
        kind = extra.get('model_type') or extra.get('architecture') or ''
        try:
            reader = families.reader(flat, family, kind)
        except families.UnknownNames as unknown:
            flat, prefix, note = names.unwrap(
                flat, lambda arrays: bool(families.match_families(arrays, family))
            )
            if not prefix:
                raise unknown from None
            place = f'{place}, below {prefix}'
            reader = families.reader(flat, family, kind)
        imported = reader.read(flat, extra)
        imported = imported.with_notes(note) if note else imported
        imported = _apply_problem_type(imported, extra)
        _require_sound(imported)
        num_classes = imported.model_config.get('num_classes') or None
        return dataclasses.replace(
            _add_transforms(imported, extra),
            class_names=read_class_names(extra, num_classes),
            num_classes=num_classes,
            path=Path(path),
            origin=os.fspath(path),
            positions=getattr(reader, 'POSITIONS', imported.positions),
        )
    except UserError as error:
        raise UserError(f'{place}: {error}') from None
    except Exception as error:
        if family:  # possibly the user's module, which needs the traceback
            raise
        cause = shorten(f'{type(error).__name__}: {error}', 200, placeholder=' ...')
        raise UserError(
            f'{place}: arrays or config.json are not as in files of this kind ({cause})'
        ) from error


def _apply_problem_type(imported: TrainedModel, extra: Mapping[str, Any]) -> TrainedModel:
    """Give a multi-label classifier its sigmoid, following `problem_type` of transformers."""
    task = imported.task_config
    if extra.get(_PROBLEM) != _SEVERAL_LABELS or task['name'] != 'classify':
        return imported
    return imported.with_groups(task={**task, 'loss_name': 'sigmoid'})


def _record_problem_type(written: Written, imported: TrainedModel) -> Written:
    """Record in `problem_type` of transformers that a classifier has several labels."""
    config, loss = written.config or {}, imported.task_config.get('loss_name')
    is_theirs = 'model_type' in config and 'id2label' in config
    if not (is_theirs and loss in ('sigmoid', 'asymmetric')):
        return written
    return written._replace(config={**config, _PROBLEM: _SEVERAL_LABELS})


def _take_tower(
    flat: dict[str, np.ndarray], extra: dict[str, Any], tower: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the config of one of two towers, OpenCLIP's translated."""
    from vit_jax.interop.families import open_clip

    take = open_clip.tower if open_clip.matches(flat) else texts.take_tower
    return take(flat, extra, tower)


def _add_transforms(imported: TrainedModel, extra: Mapping[str, Any]) -> TrainedModel:
    """Add the transforms of its files, unless the family has set them."""
    if imported.transforms:
        recipe = preprocessing.parse_recipe(imported.transforms)
    elif imported.takes_images:
        recipe = preprocessing.read_recipe(extra, imported.image_size)
        text = recipe.text if recipe else ''
        notes = preprocessing.transform_notes(extra, text)
        imported = dataclasses.replace(
            imported.with_groups(data={**imported.config.data, 'transforms': text}),
            notes=(*imported.notes, *notes),
        )
    else:
        recipe = None
    prepared_size = recipe.output_size if recipe else None
    prepared = dataclasses.replace(imported, prepared_size=prepared_size)
    reads_text = texts.FIELD in imported.spec and files.TOKENIZER in extra
    return texts.with_tokenizer(prepared, extra) if reads_text else prepared


def _with_preparation(imported: TrainedModel) -> TrainedModel:
    """Add transforms that prepare files, if the run's images all had one size.

    They are the same as in `inference.images.crop_and_resize`.
    """
    data, size = imported.data, imported.raw_images.get('size')
    has_plan = data.sizes or data.plan
    if not size or has_plan or re.search('resize|crop|patches|windows', imported.transforms):
        return imported
    before = preprocessing.crop(tuple(size), 'bicubic')
    text = '|'.join(filter(None, (before, imported.transforms)))
    evals = {name: {**entry, 'transforms': text} for name, entry in imported.config.evals.items()}
    return imported.with_groups(data={**imported.config.data, 'transforms': text}, evals=evals)


def _with_transforms(written: Written, text: str, family: str) -> Written:
    """Add a preprocessor that makes images like the model's own transforms, or a note."""
    processor = written.preprocessor or {}
    if (written.config or {}).get('num_channels') == 1:
        note = 'transformers opens files in color: pass gray arrays [H, W, 1] to its processor'
        written = written._replace(notes=(*written.notes, note))
    if not processor:
        return written
    if processor.get('image_processor_type') == 'ViTImageProcessor':  # not set by the family
        written = written._replace(preprocessor=processor | preprocessing.transformers_keys(text))
    try:
        notes = preprocessing.differences(text, _restored_transforms(written, family))
    except families.UnknownNames:  # the user's own family, which only writes
        return written
    return written._replace(notes=(*written.notes, *notes))


def _restored_transforms(written: Written, family: str) -> str:
    """Read the transforms that a model has when it is read again from its files.

    Raises:
      UnknownNames: if no family reads the files.
    """
    extra = {**(written.config or {}), normalization.PREPROCESSOR: written.preprocessor}
    reader = families.reader(written.arrays, family, extra.get('model_type') or '')
    return _add_transforms(reader.read(dict(written.arrays), extra), extra).transforms


def _require_sound(imported: TrainedModel) -> None:
    """Raise UserError for parameters or numbers of config.json that break any model."""
    for name, array in param_paths(imported.params).items():
        if not np.isfinite(array).all():
            raise UserError(f'{name} has NaN or infinite numbers; download the file again')
    epsilon, size = imported.model_config.get('norm_eps', 1.0), imported.image_size
    if not 0 < epsilon < math.inf:
        raise UserError(
            f'its layer norms add {epsilon} to the variance; download config.json again'
        )
    if size and (min(size) < 1 or math.prod(size) > MAX_PIXELS):
        raise UserError(f'its images cannot have {size[1]} x {size[0]} pixels; check config.json')


def write(imported: TrainedModel, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write a model for another code base.

    A model that was read from a file of the same form and has not changed is written as it was
    read: the same arrays, names, precision, config.json and other files.

    Args:
      imported: Model.
      path: FILE.npz, or FILE.safetensors or a folder for transformers, or for timm or the authors'
        code if only these have the model; with an optional family in front, such as `timm_vit:`,
        see `families`.

    Returns:
      A note for each property of the model that the files cannot represent.

    Raises:
      UserError: if no family writes such a model in this form, or the file cannot be written.
    """
    ref = ModelRef.parse(path)
    family, place = ref.family, ref.place
    if family == 'peft':
        from vit_jax.interop import peft

        return peft.write(imported, place)
    is_npz = Path(place).suffix == '.npz'
    forms = ['npz'] if is_npz else ['transformers', 'timm', 'authors']
    if (stored := _read_original(imported, forms, family)) is not None:
        _write(stored, place)
        return ()
    build = families.writer(str(imported.settings.model.name), forms, family)
    imported = _with_preparation(imported)
    flat = unroll(param_paths(imported.params))
    unrolled = dataclasses.replace(imported, params=traverse_util.unflatten_dict(flat, sep='/'))
    written = _with_transforms(Written(*build(unrolled)), imported.transforms, family)
    written = _record_problem_type(written, imported)
    other_files, notes = ({}, ()) if is_npz else texts.tokenizer_files(imported)
    _write(written._replace(others={**written.others, **other_files}), place)
    if is_npz and imported.class_names:
        notes = ('class names are lost: an .npz file cannot store them',)
    return (*written.notes, *notes)


def _write(written: Written, place: str) -> None:
    if place.endswith('.npz'):
        files.write_npz(place, written.arrays)
    else:
        files.write_safetensors(
            *(place, written.arrays, written.config, written.preprocessor),
            others=written.others,
            weights=written.weights,
        )


def _read_original(imported: TrainedModel, forms: Sequence[str], family: str) -> Written | None:
    """Read the original file if it has the requested form, one of `forms`, see `families.writer`.

    None if there is no such file, or the model has changed since.
    """
    source = ModelRef.parse(imported.origin)
    if not imported.origin or source.part:
        return None
    try:
        flat, config = files.read_stored(source)
        kind = config.get('model_type') or config.get('architecture') or ''
        reader = families.reader(flat, source.family, kind)
        form = families.form(flat, config, reader)
        available = families.writers(str(imported.settings.model.name), family)
        target_form = next((name for name in forms if name in available), '')
        if not target_form and reader.__name__.endswith(
            f'.{family}'
        ):  # it only writes what it reads
            target_form = form
        is_moved = files.EXPLICIT in config  # config.json is at an explicit place
        is_form = form != '' and form == target_form and not is_moved
        if not (is_form and _is_same(read(imported.origin), imported)):
            return None
        other_files = {} if form == 'npz' else files.read_beside(source)
        return Written(flat, others=other_files, weights=getattr(reader, 'WEIGHTS', ''))
    except UserError:  # the file is gone
        return None


def _is_same(stored: TrainedModel, other: TrainedModel) -> bool:
    """Return whether two models would write the same files."""
    settings = [
        (m.model_config, m.task_config, m.transforms, m.image_size, m.class_names)
        for m in (stored, other)
    ]
    stored_arrays, other_arrays = param_paths(stored.variables), param_paths(other.variables)
    return (
        settings[0] == settings[1]
        and stored_arrays.keys() == other_arrays.keys()
        and all(np.array_equal(stored_arrays[name], other_arrays[name]) for name in stored_arrays)
    )
