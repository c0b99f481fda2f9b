"""TIPSv2 of transformers, there and back: embeddings, logits and the image tower alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_models import perturbed

import vit_jax
from vit_jax import interop
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import parse_transforms
from vit_jax.data.vocabulary import load_vocabulary
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.models import tips

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

VISION = {
    **{'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'mlp_ratio': 2},
    **{'image_size': 32, 'patch_size': 8},
}
TEXT = {
    **{'vocab_size': 20, 'hidden_size': 32, 'intermediate_size': 24, 'num_hidden_layers': 2},
    **{'num_attention_heads': 4, 'max_position_embeddings': 6},
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 20, (3, 6))
IDS[0, 3:] = IDS[1, 1:] = 0  # padding


def reference(**vision):
    torch.manual_seed(0)
    config = transformers.Tipsv2Config(text_config=TEXT, vision_config=VISION | vision)
    model = transformers.Tipsv2Model(config)
    return perturbed(model, lambda name, p: torch.tensor(0.05) if name == 'temperature' else None)


def theirs(model, images):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(IDS),
            attention_mask=torch.tensor((IDS != 0).astype(int)),
            pixel_values=torch.tensor(images).permute(0, 3, 1, 2),
        )


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tips')
    model = reference()
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parity
@pytest.mark.parametrize('gated', [False, pytest.param(True, marks=pytest.mark.long)])
def test_embeddings_and_logits_are_those_of_transformers(saved, tmp_path, gated):
    """Also at another size, and of the image tower alone; texts of one token and of all."""
    folder, model = saved
    if gated:
        folder, model = tmp_path / 'gated', reference(use_swiglu_ffn=True)
        model.save_pretrained(folder)
    model.vision_model.save_pretrained(tmp_path / 'vision')
    for size in ((32, 32), (48, 24)):
        images = RNG.uniform(0, 1, (2, *size, 3)).astype(np.float32)
        expected = theirs(model, images)
        ours, variables = vit_jax.load(folder, image_size=size)
        pixels = jnp.asarray(2 * images - 1)  # `load` takes images in [-1, 1]
        outputs = jax.jit(ours.apply)(variables, pixels, jnp.asarray(IDS, jnp.int32))
        for name in ('image', 'text'):
            embeds = expected[f'{name}_embeds'].numpy()
            np.testing.assert_allclose(outputs[name], embeds, atol=1e-5)
        logits = outputs['scale'] * outputs['image'] @ outputs['text'].T
        np.testing.assert_allclose(logits, expected.logits_per_image.numpy(), atol=1e-5)
        tower, variables = vit_jax.load(tmp_path / 'vision', image_size=size)
        pooled = jax.jit(tower.apply)(variables, pixels)['pre_logits']
        of_vision = expected.vision_model_output.pooler_output.numpy()
        np.testing.assert_allclose(pooled, of_vision, atol=1e-5)


@pytest.mark.parity
def test_transformers_reads_what_is_written(saved, tmp_path):
    folder, model = saved
    trained = interop.read(folder)
    assert trained.model_config['name'] == 'tips' and trained.image_size == (32, 32)
    assert trained.task.normalization == ((0.0,) * 3, (1.0,) * 3)
    assert trained.task_config['loss_name'] == 'softmax'
    assert interop.write(anew(trained), tmp_path) == ()
    again, info = transformers.Tipsv2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys']
    images = RNG.uniform(0, 1, (2, 32, 32, 3)).astype(np.float32)
    logits, expected = (theirs(m.eval(), images).logits_per_image for m in (again, model))
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_positions_are_the_references():
    """A geometric series whose last frequency is 1 / 10,000."""
    table = tips.timing(3, 8)
    np.testing.assert_allclose(table[1, :4], np.sin(10.0 ** -np.array([0, 4 / 3, 8 / 3, 4])))
    np.testing.assert_allclose(table[2, 4:], np.cos(2 * 10.0 ** -np.array([0, 4 / 3, 8 / 3, 4])))


def test_texts_without_an_end():
    tokenize = parse_transforms("tokenize('caption', 4, end=False)", load_vocabulary('bytes'))
    for text, ids in (('ab', [101, 102, 0, 0]), ('abcdef', [101, 102, 103, 104])):
        record = tokenize({'caption': text}, example_rng(0, 0))
        assert record['caption'].tolist() == ids and record['caption'].dtype == np.int32
        assert record['caption_mask'].sum() == min(len(text), 4)


HEADS = {
    'depth': ('DepthEstimation', 'predicted_depth'),
    'normals': ('NormalEstimation', 'normals'),
    'segmentation': ('SemanticSegmentation', 'logits'),
    'all': ('DensePrediction', 'predicted_depth'),
}


def dpt(kind):
    torch.manual_seed(0)
    layers = {'out_indices': [1, 2], 'reshape_hidden_states': False, 'apply_layernorm': True}
    config = transformers.Tipsv2DptConfig(
        backbone_config=transformers.Tipsv2VisionConfig(**VISION, **layers),
        neck_hidden_sizes=[4, 6],
        reassemble_factors=[2, 0.5],
        fusion_hidden_size=8,
        num_depth_bins=12,
        num_labels=5,
    )
    return perturbed(getattr(transformers, f'Tipsv2DptFor{HEADS[kind][0]}')(config), moderate)


def moderate(name, p):
    """Kernels of gain one, so that rounding does not grow."""
    fan_in = p[0].numel() if 'resize' not in name else p.shape[0]
    return torch.randn(p.shape) * fan_in**-0.5 if p.ndim > 1 and 'weight' in name else None


@pytest.mark.parity
@pytest.mark.parametrize('kind', ['depth', 'normals', 'segmentation', 'all'])
def test_dense_predictions_are_those_of_transformers(kind, tmp_path):
    """Also at another size; written again they are the same bit for bit."""
    model = dpt(kind)
    model.save_pretrained(tmp_path / 'theirs')
    trained = interop.read(tmp_path / 'theirs')
    tasks = {'segmentation': 'segment_pixels', 'all': 'depth'}
    assert trained.task_config['name'] == tasks.get(kind, kind)
    assert any('left out' in note for note in trained.notes) == (kind == 'all')
    for size in ((32, 32), (48, 24)):
        images = RNG.uniform(0, 1, (2, *size, 3)).astype(np.float32)
        with torch.no_grad():
            outputs = model(torch.tensor(images).permute(0, 3, 1, 2))
        expected = getattr(outputs, HEADS[kind][1]).numpy()
        ours, variables = vit_jax.load(tmp_path / 'theirs', image_size=size)
        # `load` takes images in [-1, 1], but prepared ones for segmentation.
        pixels = jnp.asarray(images if kind == 'segmentation' else 2 * images - 1)
        predicted = jax.jit(ours.apply)(variables, pixels)
        (predicted,) = predicted.values()
        if expected.ndim == 4:
            expected = expected.transpose(0, 2, 3, 1)
        assert np.std(expected) > 1e-2
        np.testing.assert_allclose(predicted, expected, atol=1e-5 * np.abs(expected).max())
    if kind != 'all':
        interop.write(anew(trained), tmp_path / 'ours')
        again, info = type(model).from_pretrained(tmp_path / 'ours', output_loading_info=True)
        assert not info['missing_keys'] and not info['unexpected_keys']
        theirs_by_name = dict(model.named_parameters())
        for name, p in again.named_parameters():
            if 'mask_token' not in name:
                np.testing.assert_array_equal(p.detach(), theirs_by_name[name].detach(), name)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'text_config': {**TEXT, 'hidden_act': 'gelu'}}, 'gelu'),
        ({'text_encoder.ln_final.weight': None}, r'text_encoder\.ln_final\.weight'),
        ({'vision_encoder.norm.weight': None}, r'norm\.weight'),
    ],
)
def test_other_files_are_refused(saved, tmp_path, change, message):
    flat, extra = files.read_arrays(saved[0])
    arrays = {k: x for k, x in flat.items() if change.get(k, 0) is not None}
    config = {k: x for k, x in change.items() if x is not None}
    files.write_safetensors(tmp_path, arrays, extra | config)
    with pytest.raises(UserError, match=message):
        interop.read(tmp_path)
