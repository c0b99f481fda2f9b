"""Checkpoints of other code bases, read and written."""

from __future__ import annotations

import dataclasses
import os

from vit_jax.errors import UserError
from vit_jax.interop import bit, files, huggingface, labels, names, timm, vision_transformer
from vit_jax.interop.files import Foreign

# Each has `matches(flat)` and `read(flat, extra)`; the first that matches reads.
READERS = (vision_transformer, huggingface, timm, bit)


def read(path: str | os.PathLike[str]) -> Foreign:
    """A checkpoint of another code base, whatever its form.

    Args:
      path: a file, a folder or a URL; see `files.read_arrays`.

    Raises:
      UserError: if it cannot be read, or holds none of the models that are known.
    """
    flat, extra = files.read_arrays(path)
    for reader in READERS:
        if reader.matches(flat):
            try:
                foreign = reader.read(flat, extra)
                return dataclasses.replace(foreign, class_names=labels.read(extra))
            except UserError as error:
                raise UserError(f'{os.fspath(path)}: {error}') from None
    held = names.listed(sorted(flat)) or 'nothing'
    raise UserError(
        f'{os.fspath(path)}: no model is known with such parameters (it holds {held}); '
        'ViT, hybrids and BiT of vision_transformer, big_vision, transformers and timm are'
    )
