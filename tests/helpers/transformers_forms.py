"""Small encoders of transformers of every form that is read as a ViT."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from helpers.transformers_models import perturbed

SHAPE = {
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
    'patch_size': 4,
    'image_size': 12,
}
_TEXT = {
    'hidden_size': 16,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'intermediate_size': 24,
    'vocab_size': 99,
    'projection_size': 16,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}


class Form(NamedTuple):
    """A model of transformers.

    Attributes:
      family: for tables.
      model, config: names of its classes in transformers.
      fields: of the configuration, beside those of SHAPE.
      theirs, ours: an output of the two sides to compare.
      tower: of the file that is read.
      written: the class that it is written as; empty for its own, None if it is refused.
    """

    family: str
    model: str
    config: str
    fields: Mapping[str, Any] = types.MappingProxyType({})
    theirs: str = 'logits'
    ours: str = 'logits'
    tower: str = ''
    written: str | None = ''

    @property
    def label(self) -> str:
        """The model and what is special about it."""
        return '-'.join([self.model, *map(str, self.fields.values()), self.tower]).strip('-')


def two_towers(vision: dict[str, Any] = SHAPE) -> dict[str, Any]:
    return {'vision_config': dict(vision), 'text_config': dict(_TEXT), 'projection_dim': 8}


_POOLED = {'theirs': 'pooler_output', 'ours': 'pre_logits'}
_CLASSIFIER = 'ForImageClassification'
FORMS = (
    Form('ViT', f'ViT{_CLASSIFIER}', 'ViTConfig'),
    Form('DeiT', f'DeiT{_CLASSIFIER}', 'DeiTConfig'),
    Form('DeiT', 'DeiTModel', 'DeiTConfig', **_POOLED),
    Form('DeiT', f'DeiT{_CLASSIFIER}WithTeacher', 'DeiTConfig'),
    Form('BEiT', f'Beit{_CLASSIFIER}', 'BeitConfig', {'use_relative_position_bias': True}),
    Form(
        'BEiT',
        'BeitModel',
        'BeitConfig',
        {'use_shared_relative_position_bias': True, 'use_absolute_position_embeddings': True},
        **_POOLED,
    ),
    Form(
        'Data2Vec',
        f'Data2VecVision{_CLASSIFIER}',
        'Data2VecVisionConfig',
        {'use_mean_pooling': False, 'use_absolute_position_embeddings': True},
        written='BeitForImageClassification',
    ),
    Form(
        'Data2Vec',
        'Data2VecVisionModel',
        'Data2VecVisionConfig',
        {'use_relative_position_bias': True},
        theirs='last_hidden_state',
        ours='tokens',
        written=None,
    ),
    Form(
        'YOLOS, body',
        'YolosModel',
        'YolosConfig',
        {'num_detection_tokens': 3, 'use_mid_position_embeddings': False, 'image_size': [12, 12]},
        **_POOLED,
    ),
    Form('MSN', f'ViTMSN{_CLASSIFIER}', 'ViTMSNConfig'),
    Form('I-JEPA', f'IJepa{_CLASSIFIER}', 'IJepaConfig'),
    Form('I-JEPA', 'IJepaModel', 'IJepaConfig', theirs='last_hidden_state', ours='tokens'),
    Form('DINOv2', f'Dinov2{_CLASSIFIER}', 'Dinov2Config'),
    Form('DINOv2', 'Dinov2Model', 'Dinov2Config', {'use_swiglu_ffn': True}, **_POOLED),
    Form(
        'DINOv2 with registers',
        f'Dinov2WithRegisters{_CLASSIFIER}',
        'Dinov2WithRegistersConfig',
        {'num_register_tokens': 3},
    ),
    Form('DINOv3', 'DINOv3ViTModel', 'DINOv3ViTConfig', {'num_register_tokens': 3}, **_POOLED),
    Form(
        'DINOv3',
        'DINOv3ViTModel',
        'DINOv3ViTConfig',
        {'use_gated_mlp': True, 'hidden_act': 'silu', 'rope_theta': 50.0},
        **_POOLED,
    ),
    Form('CLIP', 'CLIPVisionModel', 'CLIPVisionConfig', **_POOLED),
    Form(
        'CLIP',
        'CLIPVisionModelWithProjection',
        'CLIPVisionConfig',
        {'projection_dim': 8, 'hidden_act': 'gelu'},
        theirs='image_embeds',
    ),
    Form('CLIP', f'CLIP{_CLASSIFIER}', 'CLIPConfig', two_towers()),
    Form(
        'CLIP',
        'CLIPModel',
        'CLIPConfig',
        two_towers(),
        theirs='image_embeds',
        tower='vision',
        written='CLIPVisionModelWithProjection',
    ),
    Form(
        'MetaCLIP 2',
        f'MetaClip2{_CLASSIFIER}',
        'MetaClip2Config',
        two_towers(),
        written=f'CLIP{_CLASSIFIER}',
    ),
    Form(
        'AltCLIP', 'AltCLIPVisionModel', 'AltCLIPVisionConfig', **_POOLED, written='CLIPVisionModel'
    ),
    Form(
        'CLIPSeg', 'CLIPSegVisionModel', 'CLIPSegVisionConfig', **_POOLED, written='CLIPVisionModel'
    ),
    Form('SigLIP', 'SiglipVisionModel', 'SiglipVisionConfig', **_POOLED),
    Form(
        'SigLIP',
        f'Siglip{_CLASSIFIER}',
        'SiglipConfig',
        two_towers(),
        written=f'IJepa{_CLASSIFIER}',
    ),
    Form(
        'SigLIP',
        'SiglipModel',
        'SiglipConfig',
        two_towers(),
        **_POOLED,
        tower='vision',
        written='SiglipVisionModel',
    ),
    Form(
        'SigLIP 2',
        'Siglip2VisionModel',
        'Siglip2VisionConfig',
        {'num_patches': 9, 'image_size': None},
        **_POOLED,
        written='SiglipVisionModel',
    ),
)
# One of each way to place positions; other classes share their code.
RESIZED = [
    next(form for form in FORMS if (form.family, form.model) == pair)
    for pair in (
        *(('DeiT', f'DeiT{_CLASSIFIER}WithTeacher'), ('BEiT', 'BeitModel')),
        *(
            ('BEiT', f'Beit{_CLASSIFIER}'),
            ('YOLOS, body', 'YolosModel'),
            ('MSN', f'ViTMSN{_CLASSIFIER}'),
        ),
        *(('I-JEPA', 'IJepaModel'), ('DINOv2', 'Dinov2Model')),
        *(
            ('DINOv2 with registers', f'Dinov2WithRegisters{_CLASSIFIER}'),
            ('DINOv3', 'DINOv3ViTModel'),
        ),
        *(('CLIP', 'CLIPVisionModel'), ('SigLIP', 'SiglipVisionModel')),
    )
]


def model(form: Form) -> Any:
    """The model, with parameters none of which is zero, one or like another."""
    import transformers

    fields = form.fields if 'vision_config' in form.fields else {**SHAPE, **form.fields}
    fields = {key: value for key, value in fields.items() if value is not None}
    if not form.tower and 'Vision' not in form.model:
        fields['num_labels'] = 3
    made = getattr(transformers, form.model)(getattr(transformers, form.config)(**fields))
    return perturbed(made)


def outputs(form: Form, made: Any, images: np.ndarray, resized: bool = False) -> np.ndarray:
    """What transformers computes for images [B H W 3]; `resized` if they are not of its size."""
    import torch

    pixels = torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2))
    with torch.no_grad():
        if form.family == 'SigLIP 2':
            return _of_patches(made, images)[form.theirs].numpy()
        if form.tower and form.theirs == 'image_embeds':
            return _features(made.get_image_features(pixels)).numpy()
        made = getattr(made, 'vision_model', made) if form.tower else made
        known = 'interpolate_pos_encoding' in inspect.signature(made.forward).parameters
        options = {'interpolate_pos_encoding': True} if resized and known else {}
        return made(pixels, **options)[form.theirs].numpy()


def hidden_states(form: Form, made: Any, images: np.ndarray) -> list[np.ndarray]:
    """The hidden states of transformers for images [B H W 3]."""
    import torch

    pixels = torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2))
    asked = {'output_hidden_states': True}
    with torch.no_grad():
        if form.family == 'SigLIP 2':
            found = _of_patches(made, images, **asked)
        else:
            found = (getattr(made, 'vision_model', made) if form.tower else made)(pixels, **asked)
    states = [state.numpy() for state in found.hidden_states]
    if 'num_detection_tokens' in form.fields:  # YOLOS has them at the end, and we before patches
        count = form.fields['num_detection_tokens']
        order = np.r_[0, -count:0, 1 : states[0].shape[1] - count]
        states = [state[:, order] for state in states]
    return states


def _features(found: Any) -> Any:
    """The embedding, which newer versions return with other outputs."""
    return getattr(found, 'pooler_output', found)


def _of_patches(made: Any, images: np.ndarray, **options: Any) -> Any:
    """The outputs of a model that takes patches instead of images."""
    import torch

    from vit_jax.nn.patches import patchify

    patches = torch.from_numpy(np.array(patchify(images, SHAPE['patch_size'])))
    batch, count, _ = patches.shape
    side = round(count**0.5)
    return made(
        pixel_values=patches,
        pixel_attention_mask=torch.ones(batch, count, dtype=torch.int32),
        spatial_shapes=torch.tensor([[side, side]] * batch),
        **options,
    )
