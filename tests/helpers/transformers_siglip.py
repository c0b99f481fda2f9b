"""A small SiglipModel of transformers with random parameters, and inputs for it."""

import numpy as np

from helpers.transformers_models import perturbed

LENGTH, VOCAB, SIZE = 6, 19, 8


def reference(text=None, **fields):
    """The model, none of whose parameters has its initial value; `text` are fields of its tower."""
    import transformers

    shape = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2}
    shape |= {'num_attention_heads': 2} | fields
    words = shape | {'hidden_size': 8, 'projection_size': 16, 'num_attention_heads': 4}
    words |= {'bos_token_id': 1, 'eos_token_id': 2, 'vocab_size': VOCAB}
    config = transformers.SiglipConfig(
        text_config=words | {'max_position_embeddings': LENGTH} | (text or {}),
        vision_config=shape | {'image_size': SIZE, 'patch_size': 4},
    )
    return perturbed(transformers.SiglipModel(config))


def batch(rows=5, seed=0):
    """Bytes of images and ids of texts."""
    rng = np.random.default_rng(seed)
    return {
        'image': rng.integers(0, 256, (rows, SIZE, SIZE, 3), np.uint8),
        'caption': rng.integers(0, VOCAB, (rows, LENGTH), dtype=np.int32),
    }
