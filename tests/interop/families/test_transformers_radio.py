"""RADIO of transformers: tokens agree at any size, with gates and several class tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from vit_jax import interop

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

pytestmark = pytest.mark.parity
SIZES = {
    **{'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'mlp_ratio': 2.0},
    **{'patch_size': 4, 'image_size': 16, 'max_img_size': 32, 'attn_implementation': 'eager'},
}


def saved(folder, **options):
    """A RadioModel with random parameters, and its folder."""
    torch.manual_seed(0)
    model = transformers.RadioModel(transformers.RadioConfig(**SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ('options', 'size'),
    [
        ({}, (32, 32)),
        ({'use_swiglu_ffn': True, 'qkv_bias': False, 'summary_idxs': [1, 2]}, (16, 24)),
        ({'video_temporal_patch_size': 2, 'num_registers': 0}, (24, 16)),
    ],
)
def test_tokens_are_those_of_transformers(tmp_path, options, size):
    model = saved(tmp_path, **options)
    images = np.random.default_rng(0).uniform(size=(2, *size, 3)).astype(np.float32)
    with torch.no_grad():
        found = model(torch.tensor(images).permute(0, 3, 1, 2))
    network, variables = vit_jax.load(tmp_path, image_size=size)
    outputs = jax.jit(network.apply)(variables, jnp.asarray(2 * images - 1))
    first = options.get('summary_idxs', [0])[0]
    order = [first, *(i for i in range(found.last_hidden_state.shape[1]) if i != first)]
    expected = found.last_hidden_state[:, order].numpy()
    np.testing.assert_allclose(outputs['tokens'], expected, atol=1e-5)
    np.testing.assert_allclose(outputs['pre_logits'], found.summary[:, :16], atol=1e-5)


def test_its_size_and_colors_come_from_the_files(tmp_path):
    saved(tmp_path, norm_mean=[0.1, 0.2, 0.3], norm_std=[0.4, 0.5, 0.6])
    trained = interop.read(tmp_path)
    assert trained.image_size == (32, 32)
    np.testing.assert_allclose(trained.task.mean, [0.1, 0.2, 0.3], atol=1e-6)
