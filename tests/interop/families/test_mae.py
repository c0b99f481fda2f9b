"""Masked autoencoders of others, there and back: predictions, losses and features agree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions
from helpers.round_trips import anew
from helpers.transformers_models import theirs
from helpers.vit_mae import ours, reference

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.models import vit
from vit_jax.ops import terms
from vit_jax.tasks.reconstruct import Task

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

NOISE = np.random.default_rng(2).random((3, 36)).astype(np.float32)

# Of version 4 by those of version 5.
NAMES_4 = [
    (r'^vit\.layers\.', 'vit.encoder.layer.'),
    (r'attention\.q_proj', 'attention.attention.query'),
    (r'attention\.k_proj', 'attention.attention.key'),
    (r'attention\.v_proj', 'attention.attention.value'),
    (r'attention\.o_proj', 'attention.output.dense'),
    (r'mlp\.fc1', 'intermediate.dense'),
    (r'mlp\.fc2', 'output.dense'),
]
# Of the authors by those of version 5.
AUTHORS = [
    (r'^vit\.embeddings\.patch_embeddings\.projection', 'patch_embed.proj'),
    (r'^vit\.embeddings\.position_embeddings', 'pos_embed'),
    (r'^vit\.embeddings\.', ''),
    (r'^vit\.layers\.', 'blocks.'),
    (r'^vit\.layernorm', 'norm'),
    (r'^decoder\.decoder_layers\.', 'decoder_blocks.'),
    (r'^decoder\.', ''),
    (r'\.layernorm_before\.', '.norm1.'),
    (r'\.layernorm_after\.', '.norm2.'),
    (r'\.attention\.o_proj', '.attn.proj'),
]


def renamed(arrays, rules):
    def name(key):
        for new, old in rules:
            key = re.sub(new, old, key)
        return key

    return {name(key): array for key, array in arrays.items()}


def state(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def of_the_authors(model):
    """Their names; queries, keys and values are one layer."""
    arrays = renamed(state(model), AUTHORS)
    for name in [n for n in arrays if '.attention.q_proj.' in n]:
        parts = [arrays.pop(name.replace('q_proj', f'{part}_proj')) for part in 'qkv']
        arrays[name.replace('attention.q_proj', 'attn.qkv')] = np.concatenate(parts)
    return arrays


@pytest.fixture(scope='module')
def model():
    return reference(norm_pix_loss=True, layer_norm_eps=1e-6)


def require_equal(imported, model, batch):
    """Predictions to 1e-5, the mask exactly, the loss to 1e-6."""
    noise = NOISE[:, : model.config.image_size**2 // 16]
    found, expected = ours(imported, batch, noise), theirs(model, batch, noise=noise)
    np.testing.assert_allclose(found['patches'], expected.logits, atol=1e-5)
    np.testing.assert_array_equal(found['mask'], expected.mask)
    task = Task(**{k: v for k, v in imported.task_config.items() if k != 'name'})
    loss = terms.means(task.loss(found, {'image': jnp.asarray(batch)}))['loss']
    np.testing.assert_allclose(loss, expected.loss, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('form', ['version 4', 'version 5', 'saved'])
def test_predictions_and_loss(form, model, tmp_path, images):
    if form == 'saved':
        model.save_pretrained(tmp_path)
    else:
        arrays = renamed(state(model), NAMES_4 if form == 'version 4' else [])
        files.write_safetensors(tmp_path, arrays, model.config.to_dict())
    imported = interop.read(tmp_path)
    assert imported.model_config['name'] == 'mae' and imported.image_size == (12, 12)
    require_equal(imported, model, images(3, 12, 12, 3))


@pytest.mark.slow
@pytest.mark.long
def test_another_size_and_plain_pixels(tmp_path, images):
    shallow = {'num_hidden_layers': 1, 'decoder_num_hidden_layers': 1}
    options = {'mask_ratio': 0.5, 'layer_norm_eps': 1e-3, 'qkv_bias': False}
    model = reference(image_size=16, **options, **shallow)
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    assert imported.task_config['target'] == 'pixels' and imported.model_config['mask_ratio'] == 0.5
    require_equal(imported, model, images(3, 16, 16, 3))
    count = sum(array.size for array in jax.tree.leaves(imported.params))
    assert count == sum(p.numel() for p in model.parameters())
    encoder, variables = vit_jax.load(tmp_path)
    assert encoder.no_bias == ('query', 'key', 'value')
    assert set(variables['params']['encoder']['block_0']['attention']['qkv']) == {'kernel'}


@pytest.mark.slow
@pytest.mark.parity
def test_names_of_the_authors(tmp_path, images):
    model = reference(norm_pix_loss=True, layer_norm_eps=1e-6)
    heads = {'model_args': {'num_heads': 4}, 'decoder_num_attention_heads': 2}
    files.write_safetensors(tmp_path, of_the_authors(model), heads)
    imported = interop.read(tmp_path, mean=0.5, std=0.5)
    require_equal(imported, model, images(3, 12, 12, 3))
    assert mentions(' '.join(imported.notes), 'assumed', 'normalized')


@pytest.mark.slow
def test_what_is_written_is_read_by_transformers(model, tmp_path, images):
    model.save_pretrained(tmp_path / 'old')
    imported = interop.read(tmp_path / 'old')
    interop.write(anew(imported), tmp_path / 'new')
    again, info = transformers.ViTMAEForPreTraining.from_pretrained(
        tmp_path / 'new', output_loading_info=True
    )
    assert not info['missing_keys'] and not info['unexpected_keys'], info
    require_equal(imported, again.eval(), images(3, 12, 12, 3))
    assert again.config.to_dict().keys() == model.config.to_dict().keys()


@pytest.mark.slow
def test_the_colors_of_images_and_target(model, tmp_path):
    """Bytes give the loss that transformers has of what its preprocessor makes of them."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path, mean=mean, std=std)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), dtype=np.uint8)
    task = Task(**{k: v for k, v in imported.task_config.items() if k != 'name'})
    batch = {'image': jnp.asarray(pixels)}
    found = ours(imported, task.inputs(batch)[0], NOISE[:, :9])
    seen = ((pixels / 255 - mean) / std).astype(np.float32)
    expected = theirs(model, seen, noise=NOISE[:, :9])
    np.testing.assert_allclose(found['patches'], expected.logits, atol=2e-5)
    loss = terms.means(task.loss(found, batch))['loss']
    np.testing.assert_allclose(loss, expected.loss, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('whole', [True, False], ids=['with decoder', 'encoder alone'])
def test_the_encoder_is_a_vit(whole, model, tmp_path, images):
    """With and without a decoder beside it; its features are those of transformers."""
    encoder = reference('ViTMAEModel', mask_ratio=0.0, layer_norm_eps=1e-6)
    encoder.load_state_dict(model.vit.state_dict())
    (model if whole else encoder).save_pretrained(tmp_path)
    module, variables = vit_jax.load(tmp_path)
    assert isinstance(module, vit.Model)
    batch = images(3, 12, 12, 3)
    in_order = np.tile(np.arange(9, dtype=np.float32), (3, 1))
    expected = theirs(encoder, batch, noise=in_order).last_hidden_state
    tokens = jax.jit(module.apply)(variables, batch)['tokens']
    np.testing.assert_allclose(tokens, expected, atol=1e-5)


@pytest.mark.slow
def test_mistakes(model, tmp_path):
    arrays = state(model)
    del arrays['decoder.decoder_layers.1.mlp.fc1.weight']
    files.write_safetensors(tmp_path / 'a', arrays, model.config.to_dict())
    with pytest.raises(UserError, match=r'layers.1.intermediate.dense.weight .* is missing'):
        interop.read(tmp_path / 'a')
    config = model.config.to_dict()
    del config['decoder_num_attention_heads']
    files.write_safetensors(tmp_path / 'b', state(model), config)
    with pytest.raises(UserError, match=r'attention.*8'):
        interop.read(tmp_path / 'b')
