"""How many forms of transformers' encoders are read right, refused, or wrong.

    PYTHONPATH=.:tests python -m helpers.transformers_totals

A form is a class with its defaults, or with one field of its configuration changed. Each is made
small, with random weights, and its outputs are compared with ours.
"""

from __future__ import annotations

import collections
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from helpers import transformers_forms, transformers_swin, transformers_texts
from helpers.transformers_models import perturbed, theirs
from vit_jax import interop
from vit_jax.errors import UserError

LIMIT = 1e-5  # of the largest output
Fields = dict[str, Any]
_IMAGE = 'ForImageClassification'
_VIT = transformers_forms.SHAPE
_TWO = transformers_forms.two_towers()
_WORDS = {**transformers_texts.SHAPE, 'projection_dim': 5}
_SWIN = {key: value for key, value in transformers_swin.SHAPE.items() if key != 'num_labels'}
_BIT = {'embedding_size': 64, 'hidden_sizes': [256, 512, 1024, 2048], 'depths': [1, 1, 1, 1]}
# Each of these is one form of the first class.
_ACTIVATIONS: tuple[Fields, ...] = tuple(
    {'hidden_act': name} for name in ('gelu_new', 'gelu_pytorch_tanh', 'quick_gelu', 'relu')
)
_COMMON: tuple[Fields, ...] = (
    *_ACTIVATIONS,
    *({'layer_norm_eps': 1e-3}, {'num_channels': 1}, {'patch_size': 6}),
)
_ANY: tuple[Fields, ...] = (*_COMMON, {'image_size': [12, 20]}, {'qkv_bias': False})
_RELATIVE: tuple[Fields, ...] = (
    {'use_relative_position_bias': True},
    {'use_shared_relative_position_bias': True},
    {'use_absolute_position_embeddings': True},
    {'use_mean_pooling': False},
    {'layer_scale_init_value': 0.0},
)
_DINO: tuple[Fields, ...] = ({'use_swiglu_ffn': True}, {'mlp_ratio': 2})
# The start of the classes' names, their ends, the fields that make them small, and what is changed.
_CASES: tuple[tuple[str, tuple[str, ...], Fields, tuple[Fields, ...]], ...] = (
    ('ViT', (_IMAGE, 'Model', 'ForMaskedImageModeling'), _VIT, _ANY),
    ('DeiT', (_IMAGE, 'Model', f'{_IMAGE}WithTeacher', 'ForMaskedImageModeling'), _VIT, _ANY),
    ('ViTMSN', (_IMAGE, 'Model'), _VIT, _ANY),
    ('IJepa', (_IMAGE, 'Model'), _VIT, _ANY),
    ('Beit', (_IMAGE, 'Model', 'ForMaskedImageModeling'), _VIT, (*_ACTIVATIONS, *_RELATIVE)),
    ('Data2VecVision', (_IMAGE, 'Model'), _VIT, (*_ACTIVATIONS, *_RELATIVE)),
    ('Dinov2', (_IMAGE, 'Model'), _VIT, (*_ACTIVATIONS, *_DINO)),
    ('Dinov2WithRegisters', (_IMAGE, 'Model'), _VIT, (*_ACTIVATIONS, *_DINO)),
    (
        'DINOv3ViT',
        ('Model',),
        _VIT,
        (
            {'num_register_tokens': 3},
            {'use_gated_mlp': True, 'hidden_act': 'silu'},
            {'rope_theta': 50.0},
            *({f'{part}_bias': value} for part, value in (('query', False), ('key', True))),
            *({'value_bias': False}, {'mlp_bias': False}, {'layer_norm_eps': 1e-3}),
        ),
    ),
    (
        'Yolos',
        ('Model', 'ForObjectDetection'),
        {**_VIT, 'image_size': [12, 12], 'num_detection_tokens': 3},
        ({'use_mid_position_embeddings': False}, {'num_detection_tokens': 5}),
    ),
    ('CLIPVision', ('Model', 'ModelWithProjection'), _VIT, _COMMON),
    ('CLIP', (_IMAGE, 'Model:vision', 'Model:text'), _TWO, ()),
    (
        'CLIPText',
        ('Model', 'ModelWithProjection'),
        _WORDS,
        (*_ACTIVATIONS, {'layer_norm_eps': 1e-3}),
    ),
    ('MetaClip2Vision', ('Model', 'ModelWithProjection'), _VIT, ()),
    ('MetaClip2', (_IMAGE, 'Model:vision', 'Model:text'), _TWO, ()),
    ('MetaClip2Text', ('Model', 'ModelWithProjection'), _WORDS, ()),
    ('AltCLIPVision', ('Model',), _VIT, ()),
    ('ChineseCLIPVision', ('Model',), _VIT, ()),
    ('CLIPSegVision', ('Model',), _VIT, ()),
    ('SiglipVision', ('Model',), _VIT, _COMMON),
    ('Siglip', (_IMAGE, 'Model:vision', 'Model:text'), _TWO, ()),
    ('SiglipText', ('Model',), _WORDS, _ACTIVATIONS),
    ('Siglip2Text', ('Model',), _WORDS, ()),
    ('Swin', (_IMAGE, 'Model', 'ForMaskedImageModeling'), _SWIN, _ACTIVATIONS),
    ('Swinv2', (_IMAGE, 'Model', 'ForMaskedImageModeling'), _SWIN, _ACTIVATIONS),
    ('Bit', (_IMAGE, 'Model'), _BIT, ({'layer_type': 'bottleneck'},)),
    ('MLCDVision', ('Model',), _VIT, ()),
    ('Aimv2Vision', ('Model',), _VIT, ()),
)
# An output of theirs, and ours.
_OUTPUTS = (
    *(('logits', 'logits'), ('image_embeds', 'logits'), ('pooler_output', 'pre_logits')),
    ('last_hidden_state', 'tokens'),
)


def forms() -> Iterator[tuple[str, str, Fields, str]]:
    """The class, its configuration, fields of that, and the tower that is read."""
    for start, ends, small, changes in _CASES:
        for place, end in enumerate(ends):
            name, _, tower = f'{start}{end}'.partition(':')
            for change in ({}, *changes) if place == 0 else ({},):
                yield name, f'{start}Config', {**small, **change}, tower


def outcome(name: str, config: str, fields: Fields, tower: str) -> str:
    """'read', 'wrong by ...' or the reason why it is refused."""
    import transformers

    classes = {'num_labels': 3} if 'Vision' not in name else {}
    try:
        configuration = getattr(transformers, config)(**{**fields, **classes})
        made = perturbed(getattr(transformers, name)(configuration))
    except Exception as error:
        return f'cannot be made: {error}'
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        try:
            imported = interop.read(f'{folder}:{tower}' if tower else folder)
        except UserError as error:
            return str(error).removeprefix(f'{folder}: ')
    made = getattr(made, f'{tower}_model') if tower else made
    if not imported.takes_images:
        texts = _texts(imported.model.vocab_size, imported.model.length)
        both = transformers_texts.ours(imported, texts), transformers_texts.theirs(made, texts)
        # What follows a tower in a model of both, its projection, is no part of it there.
        return _verdict(*(np.asarray(outputs[bool(tower)]) for outputs in both))
    shape = (*(imported.image_size or (64, 64)), imported.channels)
    batch = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    found = jax.jit(imported.model.apply)(imported.variables, batch)
    expected = theirs(made, batch)
    ours, other = next(
        (np.asarray(found[ours]), np.asarray(expected[key]))
        for key, ours in _OUTPUTS
        if expected.get(key) is not None and ours in found
    )
    return _verdict(ours, other.reshape(ours.shape))


def _texts(vocab_size: int, length: int) -> np.ndarray:
    """Texts that have an end, whichever it is."""
    ids = np.random.default_rng(0).integers(3, vocab_size, (3, length), dtype=np.int32)
    ids[:, 3], ids[:, 4:6] = transformers_texts.OLD_END, (vocab_size - 1, transformers_texts.END)
    return ids


def _verdict(ours: np.ndarray, other: np.ndarray) -> str:
    worst = np.abs(ours - other).max() / np.abs(other).max()
    return 'read' if worst <= LIMIT else f'wrong by {worst:.0e}'


if __name__ == '__main__':
    counts: collections.Counter[str] = collections.Counter()
    for name, config, fields, tower in forms():
        if sys.argv[1:] and not name.startswith(tuple(sys.argv[1:])):
            continue
        said = outcome(name, config, fields, tower)
        small = {**_VIT, **_TWO, **_WORDS, **_SWIN, **_BIT}
        special = [f'{key}={value}' for key, value in fields.items() if small.get(key) != value]
        print(f'{":".join(filter(None, (name, tower)))} {" ".join(special)}: {said}', flush=True)
        counts[said.split()[0] if said.split()[0] in ('read', 'wrong') else 'refused'] += 1
    print(dict(counts))
