"""Tokenizers, text transforms and towers of image-text checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.files import TOKENIZER, Flat
from vit_jax.interop.hub import TOKENIZER_CONFIG, TOKENIZERS
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.text_encoder import LARGEST
from vit_jax.storage.model_ref import TOWERS

FIELD = 'caption'
_SIGLIP = "canonicalize('{field}')|tokenize('{field}', {length}, pad='eos')"
_SIGLIP2 = "lower('{field}')|tokenize('{field}', {length}, pad='pad')"
_TIPS = "lower('{field}')|tokenize('{field}', {length}, pad='pad', end=False)"
_UNREAD = 'its tokenizer is not read: OpenCLIP also preprocesses texts in other ways'
_CLIP = "tokenize('{field}', {length})"
# Tokenizer classes of transformers for the files.
_CLASSES = dict(
    zip(TOKENIZERS, ('SiglipTokenizer', 'GemmaTokenizer', 'Siglip2Tokenizer'), strict=True)
)
_PREFIXES = {
    'vision': ('vision_model.', 'visual_projection.', 'vision_encoder.'),
    'text': ('text_model.', 'text_projection.'),
}


def with_tokenizer(imported: TrainedModel, extra: Mapping[str, Any]) -> TrainedModel:
    """Set the vocabulary next to the weights, and transforms for texts.

    SigLIP pads texts by repeating the end token; SigLIP 2 and TIPSv2 pad with the id 0, and were
    trained on lowercase text, TIPSv2 without an end token. CLIP's tokenizer lowercases texts, and
    its padding has no effect.
    """
    if imported.settings.model.name == 'open_clip' and not _ends(imported):
        return imported.with_notes(_UNREAD)
    file, (length,) = extra[TOKENIZER], imported.spec[FIELD].shape
    text_transforms = _SIGLIP if Path(file).name == TOKENIZERS[0] else _SIGLIP2
    text_transforms = _CLIP if _ends(imported) else text_transforms
    if imported.settings.model.name == 'tips':
        text_transforms = _TIPS
    data = imported.config.data
    text = '|'.join(
        filter(None, (data.transforms, text_transforms.format(field=FIELD, length=length)))
    )
    return imported.with_groups(data={**data, 'transforms': text, 'vocab': file})


def tokenizer_files(imported: TrainedModel) -> dict[str, bytes]:
    """Return the files that make transformers encode texts in the same way: contents by name.

    Empty for a model without a transformers tokenizer, such as one with a custom vocabulary.
    """
    file = Path(imported.settings.data.vocab or '')
    if file.name not in _CLASSES:
        return {}
    (length,) = imported.spec[FIELD].shape
    kind = _class_of_clip(imported) if _ends(imported) else _CLASSES[file.name]
    kind = 'Tipsv2Tokenizer' if imported.settings.model.name == 'tips' else kind
    config = {'tokenizer_class': kind, 'model_max_length': length}
    return {file.name: file.read_bytes(), TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}


def _ends(imported: TrainedModel) -> bool:
    """Return whether a text is embedded at its end token, as in CLIP."""
    return imported.model_config.get('eos') is not None


def _class_of_clip(imported: TrainedModel) -> str:
    """Return the class of CLIP's tokenizer, whose end token has the last id, or of MetaCLIP 2's."""
    model = imported.model_config
    is_clip = model['eos'] in (LARGEST, model['vocab_size'] - 1)
    return 'CLIPTokenizer' if is_clip else 'PreTrainedTokenizerFast'


def take_tower(flat: Flat, extra: Mapping[str, Any], tower: str) -> tuple[Flat, dict[str, Any]]:
    """Return the arrays of a tower with its projection, and its part of config.json.

    Args:
      flat, extra: Result of `files.read_arrays`.
      tower: One of TOWERS.

    Raises:
      UserError: if there is no such tower.
    """
    part = {name: array for name, array in flat.items() if name.startswith(_PREFIXES[tower])}
    if not part:
        prefixes = ', '.join(sorted({name.partition('.')[0] for name in flat})[:5])
        raise UserError(f'the file has no tower {tower!r} (it has: {prefixes})')
    configs = {f'{name}_config' for name in TOWERS}
    shared = {key: value for key, value in extra.items() if key not in configs}
    tower_config = extra.get(f'{tower}_config') or {}
    kind = {'model_type': f'{extra["model_type"]}_{tower}_model'} if 'model_type' in extra else {}
    return part, {**shared, **kind, **tower_config}
