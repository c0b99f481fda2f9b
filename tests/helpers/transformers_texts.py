"""Small towers for texts of transformers, and the outputs of both sides."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from helpers.transformers_models import perturbed

LENGTH, VOCAB, END, OLD_END = 6, 19, 17, 2
SHAPE = {
    **{'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2},
    **{'num_attention_heads': 4, 'vocab_size': VOCAB, 'max_position_embeddings': LENGTH},
    **{'bos_token_id': 1, 'eos_token_id': END, 'pad_token_id': 0},
}
_PROJECTED = {'projection_dim': 5}
# Families, classes and fields of their configurations.
FORMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ('CLIP, texts', 'CLIPTextModel', {}),
    ('CLIP, texts', 'CLIPTextModel', {'hidden_act': 'gelu', 'layer_norm_eps': 1e-3}),
    ('CLIP, texts', 'CLIPTextModel', {'eos_token_id': OLD_END}),
    ('CLIP, texts', 'CLIPTextModelWithProjection', _PROJECTED),
    (
        'MetaCLIP 2, texts',
        'MetaClip2TextModelWithProjection',
        {**_PROJECTED, 'eos_token_id': OLD_END},
    ),
    ('SigLIP, texts', 'SiglipTextModel', {}),
    ('SigLIP, texts', 'SiglipTextModel', {'projection_size': 5, 'hidden_act': 'gelu'}),
    ('SigLIP 2, texts', 'Siglip2TextModel', {}),
)


def reference(name: str, fields: dict[str, Any]) -> Any:
    """The model, with parameters none of which is zero, one or like another."""
    import transformers

    config = name.removesuffix('WithProjection').removesuffix('Model') + 'Config'
    made = getattr(transformers, config)(**{**SHAPE, **fields})
    return perturbed(getattr(transformers, name)(made))


def ids(model: Any = None) -> np.ndarray:
    """Five texts that have an end at different places, one of them twice.

    Of a CLIP whose config says 2 the end is the largest id.
    """
    drawn = np.random.default_rng(0).integers(3, END, (5, LENGTH), dtype=np.int32)
    drawn[[0, 1, 2, 2, 3, 4], [5, 3, 2, 4, 0, 1]] = END
    drawn[[0, 1, 2, 3, 4], [4, 4, 3, 2, 5]] = OLD_END
    config = getattr(model, 'config', None)
    config = getattr(config, 'text_config', config)
    if config is None or (config.model_type, config.eos_token_id) != ('clip_text_model', OLD_END):
        return drawn
    return np.where(drawn == END, VOCAB - 1, drawn)


def theirs(model: Any, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and tokens by transformers."""
    import torch

    with torch.no_grad():
        found = model(input_ids=torch.tensor(texts, dtype=torch.long))
    key = 'text_embeds' if 'text_embeds' in found else 'pooler_output'
    return found[key].numpy(), found['last_hidden_state'].numpy()


def ours(trained: Any, texts: np.ndarray) -> tuple[Any, Any]:
    """Embeddings and tokens of a model that was read."""
    found = jax.jit(trained.model.apply)(trained.variables, texts)
    return found.get('logits', found['pre_logits']), found['tokens']
