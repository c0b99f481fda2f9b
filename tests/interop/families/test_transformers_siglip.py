"""SigLIP of transformers, there and back: logits and the loss of both sides agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_siglip import LENGTH, SIZE, VOCAB, batch, reference

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.ops import terms

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('siglip')
    reference().save_pretrained(folder)
    return folder


def theirs(model, data):
    image = torch.tensor(data['image'], dtype=torch.float32).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(data['caption'], dtype=torch.long),
            pixel_values=image,
            return_loss=True,
        )


def ours(trained, data):
    """Logits of all pairs, and the loss."""

    data = jax.tree.map(jnp.asarray, data)

    def run(variables):
        found = trained.model.apply(variables, *trained.task.inputs(data))
        logits = found['scale'] * found['image'] @ found['text'].T + found['bias']
        return logits, terms.means(trained.task.loss(found, data))['loss']

    return jax.jit(run)(trained.variables)


@pytest.mark.parity
@pytest.mark.parametrize(
    'fields',
    [{}, pytest.param({'hidden_act': 'gelu', 'layer_norm_eps': 1e-3}, marks=pytest.mark.long)],
)
def test_logits_and_loss_are_those_of_transformers(fields, tmp_path):
    model, data = reference(**fields), batch()
    model.save_pretrained(tmp_path)
    logits, loss = ours(interop.read(tmp_path), data)
    expected = theirs(model, data)
    np.testing.assert_allclose(logits, expected.logits_per_image, atol=1e-5)
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert float(np.std(logits)) > 1e-3  # the parameters matter


def test_transformers_reads_what_is_written(saved, tmp_path):
    trained = interop.read(saved)
    assert interop.write(anew(trained), tmp_path) == ()
    again, info = transformers.SiglipModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys']
    logits = ours(trained, batch())[0]
    np.testing.assert_allclose(logits, theirs(again.eval(), batch()).logits_per_image, atol=1e-5)
    image = transformers.SiglipImageProcessorPil.from_pretrained(tmp_path)
    assert tuple(image.image_mean) == (0.5, 0.5, 0.5)


def test_the_model_that_is_read(saved):
    trained = interop.read(saved)
    model = trained.model_config
    assert model['name'] == 'siglip' and trained.task_config['name'] == 'siglip'
    assert (model['length'], model['vocab_size']) == (LENGTH, VOCAB)
    assert (model['text_width'], model['embed_dim'], model['text_num_heads']) == (8, 16, 4)
    assert trained.image_size == (SIZE, SIZE)


def test_loaded_for_larger_images(saved):
    module, variables = vit_jax.load(saved, image_size=2 * SIZE)
    assert variables['params']['image']['pos_embed'].shape == (1, 16, 16)
    made = jax.eval_shape(module.apply, variables, jnp.zeros((1, 2 * SIZE, 2 * SIZE, 3)))
    assert made['image'].shape == (1, 16)


def changed(saved, tmp_path, arrays=None, **config):
    flat, extra = files.read_arrays(saved)
    flat = {name: a for name, a in (flat | (arrays or {})).items() if a is not None}
    files.write_safetensors(tmp_path, flat, extra | config)
    return tmp_path


@pytest.mark.parametrize(
    ('arrays', 'config', 'words'),
    [
        ({'text_model.final_layer_norm.bias': None}, {}, 'text_model.final_layer_norm.bias'),
        ({'vision_model.head.probe': None}, {}, 'vision_model.head.probe'),
        ({'text_model.more': np.zeros(1)}, {}, 'no part called more'),
        ({'other': np.zeros(1)}, {}, 'no part called other'),
        ({'text_model.head.weight': np.zeros((4, 8))}, {}, 'head'),
        ({}, {'model_type': 'clip'}, "config.json .*'clip'.*siglip"),
        ({}, {'text_config': {'num_attention_heads': 2, 'hidden_act': 'relu'}}, 'hidden_act'),
        ({}, {'text_config': {'num_attention_heads': 2, 'layer_norm_eps': 0.1}}, 'differ in norm'),
        ({}, {'vision_config': None}, 'unknown number of attention heads'),
    ],
)
def test_files_that_are_not_whole(saved, tmp_path, arrays, config, words):
    path = changed(saved, tmp_path, arrays, **config)
    with pytest.raises(UserError, match=words) as error:
        interop.read(path)
    assert '\n' not in str(error.value)


def test_towers_that_transformers_lacks(saved, tmp_path):
    trained = interop.read(saved)
    other = trained.with_groups(model=trained.model_config | {'project': True})
    with pytest.raises(UserError, match='without a projection'):
        interop.write(other, tmp_path)
