"""Checkpoints of other code bases, read and written by the families that know them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.interop import families, files, labels
from vit_jax.interop.imported import ImportedModel


def read(path: str | os.PathLike[str]) -> ImportedModel:
    """The model in a checkpoint of another code base, whatever its form.

    Args:
      path: a file, a folder or a URL, see `files.read_arrays`; a family may be named in front of
        it, see `families`.

    Raises:
      UserError: if it cannot be read, or no family knows it.
    """
    family, place = families.split(path)
    flat, extra = files.read_arrays(place)
    try:
        imported = families.reader(flat, family).read(flat, extra)
    except UserError as error:
        raise UserError(f'{place}: {error}') from None
    return dataclasses.replace(imported, class_names=labels.read(extra))


def write(imported: ImportedModel, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write a model for another code base.

    Args:
      imported: the model.
      path: FILE.npz, or FILE.safetensors or a folder for transformers; a family may be named in
        front of it, see `families`.

    Returns:
      What the files cannot say of the model, a line each.

    Raises:
      UserError: if no family writes such a model in this form, or the file cannot be written.
    """
    family, place = families.split(path)
    is_npz = Path(place).suffix == '.npz'
    make = families.writer(imported.model['name'], 'npz' if is_npz else 'transformers', family)
    arrays, config, notes = make(imported)
    if is_npz:
        files.write_npz(place, arrays)
    else:
        files.write_safetensors(place, arrays, config)
    return notes
