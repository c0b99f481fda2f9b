"""YOLOS of transformers: the ViT alone is read."""

import numpy as np
import pytest
from helpers.messages import says
from helpers.transformers_models import perturbed
from helpers.transformers_vit import apply

from vit_jax import interop
from vit_jax.errors import UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

SIZES = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'patch_size': 4}
SIZES |= {'intermediate_size': 24, 'num_detection_tokens': 3, 'num_labels': 3}


def saved(folder, **fields):
    fields = {'image_size': [8, 12], 'use_mid_position_embeddings': False, **SIZES, **fields}
    made = perturbed(transformers.YolosForObjectDetection(transformers.YolosConfig(**fields)))
    made.save_pretrained(folder)
    return made


@pytest.mark.parity
def test_detection_tokens_are_registers(tmp_path, images):
    made, batch = saved(tmp_path), images(1, 8, 12, 3)
    imported = interop.read(tmp_path)
    assert imported.image_size == (8, 12)
    assert says(imported.notes[-1], 'detection head')
    tokens = apply(imported.model, imported.params, batch)['tokens']
    with torch.no_grad():
        pixels = torch.from_numpy(np.array(batch).transpose(0, 3, 1, 2))
        theirs = made.vit(pixels)['last_hidden_state'].numpy()
    theirs = np.concatenate([theirs[:, :1], theirs[:, -3:], theirs[:, 1:-3]], axis=1)
    np.testing.assert_allclose(tokens, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def test_positions_between_blocks_are_refused(tmp_path):
    saved(tmp_path, use_mid_position_embeddings=True)
    with pytest.raises(UserError, match='positions between'):
        interop.read(tmp_path)
