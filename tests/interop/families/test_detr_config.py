"""DETRs of transformers with other numbers than the paper's: right, or refused in one line."""

import json

import jax
import numpy as np
import pytest
from helpers import detr as helper
from helpers.round_trips import anew

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

CONFIGS = {
    'gelu, decoder, dilation': {
        **{'activation_function': 'gelu', 'dilation': True},
        **{'decoder_attention_heads': 2, 'decoder_ffn_dim': 40},
    },
    'silu': {'activation_function': 'silu'},
}


def saved(folder, kind='Detr', resnet=(), **fields):
    """A detector with perturbed parameters, saved by transformers."""
    config = helper.config(helper.HEADS, ['stage4']).to_dict()
    config['backbone_config'] |= dict(resnet)
    config |= fields
    made = getattr(transformers, f'{kind}Config')(**{**config, 'backbone': None})
    torch.manual_seed(0)
    model = helper.perturbed(getattr(transformers, f'{kind}ForObjectDetection')(made))
    model.save_pretrained(folder)
    return model


def assert_same_outputs(model, folder):
    batch = helper.batch()
    with torch.no_grad():
        expected = model(**helper.tensors(batch))
    module, variables = vit_jax.load(folder)
    with jax.default_matmul_precision('highest'):
        found = jax.jit(module.apply)(variables, batch['image'], batch['pixel_mask'])
    np.testing.assert_allclose(found['logits'], expected.logits, atol=1e-5)
    np.testing.assert_allclose(found['boxes'], expected.pred_boxes, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    'name', [next(iter(CONFIGS)), pytest.param('silu', marks=pytest.mark.long)]
)
def test_outputs(name, tmp_path):
    model = saved(tmp_path, **CONFIGS[name])
    assert_same_outputs(model, tmp_path)
    imported = interop.read(tmp_path)
    assert not imported.model_config['dilate']  # transformers does not dilate a ResNet of its own
    interop.write(anew(imported), tmp_path / 'again')
    again = transformers.DetrForObjectDetection.from_pretrained(tmp_path / 'again').eval()
    inputs = helper.tensors(helper.batch())
    with torch.no_grad():
        np.testing.assert_allclose(again(**inputs).logits, model(**inputs).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.long
def test_a_table_transformer_is_a_detr_with_norms_before(tmp_path):
    model = saved(tmp_path, 'TableTransformer', model_type='table-transformer')
    assert_same_outputs(model, tmp_path)
    imported = interop.read(tmp_path)
    assert imported.model_config['norm'] == 'pre'
    interop.write(anew(imported), tmp_path / 'again')
    again = transformers.TableTransformerForObjectDetection.from_pretrained(tmp_path / 'again')
    inputs = helper.tensors(helper.batch())
    with torch.no_grad():
        found, expected = again.eval()(**inputs), model(**inputs)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-5)


def test_a_detector_takes_normalized_images(folder, caplog):
    """Its first convolution is padded with the mean."""
    vit_jax.load(folder)
    assert 'images are in [0, 1] minus the mean (0.485, ' in caplog.text
    with pytest.raises(UserError, match=r'detr .*mean and std'):
        vit_jax.load(folder, mean=0.5, std=0.5)
    imported = interop.read(folder, mean=0.5, std=0.25)
    np.testing.assert_allclose(imported.value_range(), [[-2] * 3, [2] * 3])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp('detr')
    saved(place)
    return place


RESNET = {'model_type': 'resnet'}


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'activation_function': 'quick_gelu'}, "activation_function 'quick_gelu'"),
        ({'position_embedding_type': 'learned'}, "position_embedding_type 'learned'"),
        ({'model_type': 'conditional_detr'}, "'conditional_detr' is not a detr: .*conditioned"),
        ({'model_type': 'rt_detr'}, "'rt_detr' is not a detr"),
        ({'decoder_attention_heads': 0}, 'has 0 attention heads'),
        ({'dropout': -1}, 'dropout -1'),
        ({'backbone_config': RESNET | {'downsample_in_bottleneck': True}}, 'downsample_in_bott'),
        ({'backbone_config': RESNET | {'hidden_act': 'gelu'}}, "hidden_act='gelu'"),
        ({'backbone_config': RESNET | {'downsample_in_first_stage': True}}, 'in_first_stage=True'),
    ],
)
def test_other_models_are_refused(fields, words, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | fields))
    with pytest.raises(UserError, match=words):
        interop.read(tmp_path)


def test_a_conditional_detr_is_refused_by_name(tmp_path):
    saved(tmp_path, 'ConditionalDetr', model_type='conditional_detr')
    (tmp_path / 'config.json').unlink()
    with pytest.raises(UserError, match="a 'conditional_detr' is not a detr"):
        interop.read(tmp_path)
