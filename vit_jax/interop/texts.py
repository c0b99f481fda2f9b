"""The texts of a checkpoint of images and texts: its tokenizer, and the transforms for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.interop.files import TOKENIZER
from vit_jax.interop.hub import TOKENIZER_CONFIG, TOKENIZERS
from vit_jax.interop.trained import TrainedModel

FIELD = 'caption'
_SIGLIP = "canonicalize('{field}')|tokenize('{field}', {length}, pad=1)"
# The classes of transformers that read the files.
_CLASSES = dict(
    zip(TOKENIZERS, ('SiglipTokenizer', 'GemmaTokenizer', 'Siglip2Tokenizer'), strict=True)
)
_SIGLIP2 = "lower('{field}')|tokenize('{field}', {length})"


def with_tokenizer(imported: TrainedModel, extra: Mapping[str, Any]) -> TrainedModel:
    """The model with the vocabulary beside its weights, and the transforms of its texts.

    A model that takes no texts stays as it is. SigLIP repeats its end up to the length of texts;
    SigLIP 2 pads with zeros, and was trained on lower case.
    """
    if FIELD not in imported.spec or TOKENIZER not in extra:
        return imported
    file, (length,) = extra[TOKENIZER], imported.spec[FIELD].shape
    steps = _SIGLIP if Path(file).name == TOKENIZERS[0] else _SIGLIP2
    data = imported.config.data
    text = '|'.join(filter(None, (data.transforms, steps.format(field=FIELD, length=length))))
    return imported.with_groups(data={**data, 'transforms': text, 'vocab': file})


def files(imported: TrainedModel) -> dict[str, bytes]:
    """The contents of the files that make transformers encode texts likewise, by their names.

    Empty for a model without a tokenizer of transformers, such as one with a vocabulary of its own.
    """
    file = Path(str(imported.config.data.get('vocab') or ''))
    if file.name not in _CLASSES:
        return {}
    (length,) = imported.spec[FIELD].shape
    config = {'tokenizer_class': _CLASSES[file.name], 'model_max_length': length}
    return {file.name: file.read_bytes(), TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}
