"""SigLIP 2 NaFlex of transformers, and its logits of images of mixed sizes on both sides."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.transformers_models import perturbed
from vit_jax import interop
from vit_jax.data.transforms.image import cut_patches

LENGTH, VOCAB, PATCHES = 6, 19, 14
GRIDS = np.array([[2, 3], [1, 14], [7, 2], [3, 3], [1, 1]])


def reference() -> Any:
    """A small Siglip2Model, with parameters none of which is zero, one or like another."""
    import transformers

    shape: dict[str, Any] = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2}
    shape |= {'num_attention_heads': 2}
    text = shape | {'hidden_size': 8, 'projection_size': 16, 'num_attention_heads': 4}
    text |= {'vocab_size': VOCAB, 'max_position_embeddings': LENGTH}
    text |= {'bos_token_id': 1, 'eos_token_id': 2}
    config = transformers.Siglip2Config(
        text_config=text, vision_config=shape | {'patch_size': 4, 'num_patches': 25}
    )
    return perturbed(transformers.Siglip2Model(config))


def both_logits(model: Any, folder: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of five images of different sizes and four texts: theirs, and ours of the files."""
    import torch

    rng = np.random.default_rng(0)
    patches = np.zeros((5, PATCHES, 48), np.uint8)
    for row, (rows, columns) in zip(patches, GRIDS, strict=True):
        image = rng.integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8)
        row[: rows * columns] = cut_patches(image, 4)
    ids = rng.integers(0, VOCAB, (4, LENGTH))
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(ids),
            pixel_values=torch.tensor(patches, dtype=torch.float32) / 127.5 - 1,
            pixel_attention_mask=torch.tensor(np.arange(PATCHES) < GRIDS.prod(1)[:, None]).int(),
            spatial_shapes=torch.tensor(GRIDS),
        ).logits_per_image
    trained = interop.read(folder)
    batch = {'patches': jnp.asarray(patches), 'grid': jnp.asarray(GRIDS)}
    batch['caption'] = jnp.asarray(ids, jnp.int32)

    def logits(variables: Any) -> Any:
        found = trained.model.apply(variables, *trained.task.inputs(batch))
        return found['scale'] * found['image'] @ found['text'].T + found['bias']

    return expected.numpy(), np.asarray(jax.jit(logits)(trained.variables))
