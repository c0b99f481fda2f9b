"""The texts of a checkpoint of images and texts: its tokenizer, and the transforms for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.interop.files import TOKENIZER
from vit_jax.interop.hub import TOKENIZER_CONFIG, TOKENIZERS
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.text_encoder import LARGEST

FIELD = 'caption'
_SIGLIP = "canonicalize('{field}')|tokenize('{field}', {length}, pad='eos')"
_SIGLIP2 = "lower('{field}')|tokenize('{field}', {length}, pad='pad')"
_CLIP = "tokenize('{field}', {length})"
# The classes of transformers that read the files.
_CLASSES = dict(
    zip(TOKENIZERS, ('SiglipTokenizer', 'GemmaTokenizer', 'Siglip2Tokenizer'), strict=True)
)


def with_tokenizer(imported: TrainedModel, extra: Mapping[str, Any]) -> TrainedModel:
    """The model with the vocabulary beside its weights, and the transforms of its texts.

    A model that takes no texts stays as it is. SigLIP repeats its end up to the length of texts;
    SigLIP 2 pads with an id for that, 0, and was trained on lower case. CLIP's tokenizer itself
    writes in lower case, and its padding has no effect.
    """
    if FIELD not in imported.spec or TOKENIZER not in extra:
        return imported
    file, (length,) = extra[TOKENIZER], imported.spec[FIELD].shape
    steps = _SIGLIP if Path(file).name == TOKENIZERS[0] else _SIGLIP2
    steps = _CLIP if _ends(imported) else steps
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
    kind = _class_of_clip(imported) if _ends(imported) else _CLASSES[file.name]
    config = {'tokenizer_class': kind, 'model_max_length': length}
    return {file.name: file.read_bytes(), TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}


def _ends(imported: TrainedModel) -> bool:
    """Whether the end of a text is its embedding, as in CLIP."""
    return imported.model_config.get('eos') is not None


def _class_of_clip(imported: TrainedModel) -> str:
    """The class for CLIP's tokenizer, whose end is the last id, or for that of MetaCLIP 2."""
    model = imported.model_config
    own = model['eos'] in (LARGEST, model['vocab_size'] - 1)
    return 'CLIPTokenizer' if own else 'PreTrainedTokenizerFast'
