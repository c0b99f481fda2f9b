"""Tokenizers, text transforms and towers of image-text checkpoints."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax import signatures
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.interop.files import TOKENIZER, Flat
from vit_jax.interop.hub import TOKENIZER_CONFIG, TOKENIZERS
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.text_encoder import LARGEST
from vit_jax.storage import paths
from vit_jax.storage.model_ref import TOWERS

FIELD = 'caption'
_SIGLIP = "canonicalize('{field}')|tokenize('{field}', {length}, pad='eos')"
_SIGLIP2 = "lower('{field}')|tokenize('{field}', {length}, pad='pad')"
_TIPS = "lower('{field}')|tokenize('{field}', {length}, pad='pad', end=False)"
_STEPS = ('canonicalize', 'lower', 'tokenize')
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
    text_transforms = _text_transforms(imported, Path(file).name)
    data = imported.config.data
    text = '|'.join(
        filter(None, (data.transforms, text_transforms.format(field=FIELD, length=length)))
    )
    return imported.with_groups(data={**data, 'transforms': text, 'vocab': file})


def tokenizer_files(imported: TrainedModel) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files that make transformers encode texts: contents by name, and notes.

    There are none for a model without texts, or a vocabulary of no transformers tokenizer.
    """
    vocab = imported.data.vocab or imported.settings.data.vocab
    field = getattr(imported.task, 'text', FIELD)
    if not vocab or field not in imported.spec:
        return {}, ()
    (length,) = imported.spec[field].shape
    model = paths.read_bytes(file) if (file := paths.path(vocab)).is_file() else b''

    def expected(name: str) -> str:
        return _text_transforms(imported, name).format(field=field, length=length)

    steps = _text_steps(imported.transforms)
    same = [name for name in TOKENIZERS if _text_steps(expected(name)) == steps]
    if not (name := _tokenizer_name(file.name, model, same)):
        return {}, ('the vocabulary is lost: transformers has no tokenizer that encodes like it',)
    kind = _class_of_clip(imported) if _ends(imported) else _CLASSES[name]
    kind = 'Tipsv2Tokenizer' if imported.settings.model.name == 'tips' else kind
    config = {'tokenizer_class': kind, 'model_max_length': length}
    written = {name: model, TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}
    if name in same or _ends(imported):  # padding after the end has no effect
        return written, ()
    note = f'the files prepare texts with {expected(name)}, this model with {imported.transforms}'
    return written, (f'{note}: predictions differ',)


def _tokenizer_name(name: str, model: bytes, same: Sequence[str]) -> str:
    """Name a vocabulary as transformers does, whatever the name in a run; '' if it cannot be one.

    Args:
      name: Name of the file.
      model: Its contents; empty if it is missing.
      same: Names of vocabularies whose texts are prepared as the model's are.
    """
    if not model or name in _CLASSES:
        return name if model else ''
    of_sentencepiece = [name for name in same if name != TOKENIZERS[-1]]
    return TOKENIZERS[-1] if model[:1] == b'{' else next(iter(of_sentencepiece), '')


def _text_transforms(imported: TrainedModel, name: str) -> str:
    """Return the transforms of texts for a tokenizer's file, with `field` and `length` open."""
    if imported.settings.model.name == 'tips':
        return _TIPS
    if _ends(imported):
        return _CLIP
    return _SIGLIP if name == TOKENIZERS[0] else _SIGLIP2


def _text_steps(transforms: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the transforms of texts; all the files pad with the id 0."""
    steps = []
    for node in signatures.parse_transforms(transforms):
        if (name := signatures.function_name(node)) in _STEPS:
            args = parse.arguments_of(ast.unparse(node), name) or {}
            steps.append((name, {**args, 'pad': 0} if args.get('pad') == 'pad' else args))
    return steps


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
