"""Small CLIPs of transformers, and the logits of both sides."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.transformers_models import perturbed
from vit_jax.ops import terms

LENGTH, VOCAB, SIZE, END, OLD_END = 6, 19, 8, 17, 2
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def reference(name: str = 'CLIP', eos: int = END, vocab: int = VOCAB, **fields: Any) -> Any:
    """A CLIPModel, or another of its kind, with random parameters."""
    import transformers

    shape = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2}
    shape |= {'num_attention_heads': 2} | fields
    words = shape | {'hidden_size': 8, 'num_attention_heads': 4, 'bos_token_id': 1}
    words |= {'vocab_size': vocab, 'max_position_embeddings': LENGTH, 'eos_token_id': eos}
    config = getattr(transformers, f'{name}Config')(
        text_config=words,
        vision_config=shape | {'image_size': SIZE, 'patch_size': 4},
        projection_dim=5,
    )
    return perturbed(getattr(transformers, f'{name}Model')(config))


def save(model: Any, folder: str | os.PathLike[str]) -> Any:
    """Write a model, and the mean and deviation of its images; returns the folder."""
    import transformers

    model.save_pretrained(folder)
    processor = transformers.CLIPImageProcessorPil(image_mean=list(MEAN), image_std=list(STD))
    processor.save_pretrained(folder)
    return folder


def batch(eos: int = END) -> dict[str, np.ndarray]:
    """Bytes of five images, and ids of five texts with an end."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, END, (5, LENGTH), dtype=np.int32)
    ids[np.arange(5), rng.integers(1, LENGTH, 5)] = eos
    ids[0, -1] = eos
    return {'image': rng.integers(0, 256, (5, SIZE, SIZE, 3), np.uint8), 'caption': ids}


def theirs(model: Any, data: dict[str, np.ndarray], mean: Any = MEAN, std: Any = STD) -> Any:
    """The outputs of transformers, with logits and the loss."""
    import torch

    image = (data['image'] / 255.0 - np.array(mean)) / np.array(std)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(data['caption'], dtype=torch.long),
            pixel_values=torch.tensor(image, dtype=torch.float32).permute(0, 3, 1, 2),
            return_loss=True,
        )


def ours(trained: Any, data: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """Logits of all pairs, and the loss."""
    arrays = jax.tree.map(jnp.asarray, data)

    def run(variables: Any) -> tuple[Any, Any]:
        found = trained.model.apply(variables, *trained.task.inputs(arrays))
        logits = found['scale'] * found['image'] @ found['text'].T + found['bias']
        return logits, terms.means(trained.task.loss(found, arrays))['loss']

    return jax.jit(run)(trained.variables)
