"""Mean and standard deviation of a checkpoint's images: read, kept, written, or unknown."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says
from helpers.pictures import drawn
from helpers.round_trips import anew
from helpers.transformers_models import theirs
from helpers.transformers_vit import apply, ours, reference

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import adapt, files, normalization
from vit_jax.interop.families import bit, vision_transformer
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import bit_resnet, vit
from vit_jax.tasks import classify

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

IMAGENET = {'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225]}
HALF = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}


@pytest.fixture
def saved(tmp_path):
    """Saves a ViT of transformers with what its preprocessor is to say."""

    def save(preprocessor):
        model = reference()
        model.save_pretrained(tmp_path)
        if preprocessor is not None:
            content = {'image_processor_type': 'ViTImageProcessor', **preprocessor}
            (tmp_path / normalization.PREPROCESSOR).write_text(json.dumps(content))
        return model, tmp_path

    return save


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3))


def normalized(pixels, scale=1 / 255, mean=0.5, std=0.5):
    return ((pixels * scale - np.asarray(mean)) / np.asarray(std)).astype(np.float32)


@pytest.mark.parametrize(
    ('says', 'numbers'),
    [
        (IMAGENET, (1 / 255, *IMAGENET.values())),
        (HALF, (1 / 255, 0.5, 0.5)),
        ({}, (1 / 255, 0.5, 0.5)),
        ({'do_normalize': False}, (1 / 255, 0, 1)),
        ({'rescale_factor': 1 / 127.5, **IMAGENET}, (1 / 127.5, *IMAGENET.values())),
        ({'do_rescale': False, 'image_mean': [99, 88, 77], 'image_std': [60, 50, 40]},
         (1, [99, 88, 77], [60, 50, 40])),
    ],
)  # fmt: skip
def test_what_the_preprocessor_says_is_kept(saved, pixels, says, numbers):
    model, path = saved(says)
    imported = interop.read(path)
    (made,) = imported.task.inputs({'image': jnp.asarray(pixels, jnp.uint8)})
    exact = normalized(pixels, *numbers)
    np.testing.assert_allclose(made, exact, atol=4e-7 * np.abs(exact).max())
    logits = apply(imported.model, imported.params, made)['logits']
    np.testing.assert_allclose(logits, theirs(model, exact).logits, atol=1e-5)
    np.testing.assert_allclose(ours(imported, normalized(pixels))['logits'], logits, atol=1e-5)
    assert imported.notes == ()
    kernel = model.vit.embeddings.patch_embeddings.projection.weight
    kernel = kernel.detach().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(imported.params['patch_embed']['kernel'], kernel)


@pytest.mark.slow
def test_keywords_say_it_too(saved, pixels):
    model, path = saved(HALF)
    numbers = {'mean': IMAGENET['image_mean'], 'std': IMAGENET['image_std']}
    loaded, variables = vit_jax.load(path, **numbers)
    with jax.default_matmul_precision('highest'):
        logits = jax.jit(loaded.apply)(variables, jnp.asarray(normalized(pixels)))['logits']
    expected = theirs(model, normalized(pixels, **numbers)).logits
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    with pytest.raises(UserError, match='together'):
        vit_jax.load(path, mean=0.5)
    for wrong in ({'mean': 'x', 'std': 1}, {'mean': 0.5, 'std': 0}, {'mean': np.nan, 'std': 1}):
        with pytest.raises(UserError, match=r'finite number|positive'):
            vit_jax.load(path, **wrong)
    with pytest.raises(UserError, match=r'mean has 2 .*3'):
        vit_jax.load(path, mean=[0.1, 0.2], std=1)


def test_a_run_has_no_normalization(smoke_run):
    with pytest.raises(UserError, match='not to a run'):
        vit_jax.load(smoke_run, mean=0, std=1)


def test_where_nothing_tells_it_is_said(saved, tmp_path, capsys, caplog):
    saved(None)
    assert cli.main(['convert', str(tmp_path), str(tmp_path / 'out.npz')]) == 0
    assert f'note: {normalization.UNKNOWN_NORMALIZATION}\n' in capsys.readouterr().out
    vit_jax.load(tmp_path)
    assert normalization.UNKNOWN_NORMALIZATION in caplog.text


@pytest.mark.slow
def test_npz_files_take_keywords_alone(tmp_path, pixels):
    fields = dict(num_classes=4, patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)
    model = vit.Model(**fields)
    params = drawn(model, jnp.asarray(normalized(pixels)))
    path = tmp_path / 'vit.npz'
    files.write_npz(path, vision_transformer.write(params, {'name': 'vit', **fields}))
    assert interop.read(path).notes == ()
    loaded, variables = vit_jax.load(path, mean=0, std=1)
    unit = jnp.asarray(normalized(pixels, mean=0, std=1))
    expected = jax.jit(model.apply)({'params': params}, unit)['logits']
    logits = jax.jit(loaded.apply)(variables, jnp.asarray(normalized(pixels)))['logits']
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_a_resnet_keeps_it_too_but_npz_files_have_no_place_for_it(tmp_path):
    model = bit_resnet.Model(num_classes=3, layers=(1,))
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    keywords = {'name': 'bit_resnet', 'layers': (1,), 'num_classes': 3}
    trained = TrainedModel.from_file(params, keywords, None, 'a test')
    files.write_safetensors(tmp_path, *bit.write_transformers(trained)[:2], IMAGENET)
    imported = interop.read(tmp_path)
    assert imported.task.normalization == tuple(map(tuple, IMAGENET.values()))
    assert imported.notes == ()
    notes = interop.write(imported, tmp_path / 'model.npz')
    assert says(notes, '0.485, 0.456, 0.406', 'not accounted for')


@pytest.mark.parametrize('task', [{}, {'mean': (0.1, 0.2, 0.3), 'std': (0.4, 0.5, 0.6)}])
def test_a_run_that_normalizes_otherwise_starts_from_the_same_function(saved, pixels, task):
    """Its patch kernel takes up the difference, and a note says so."""
    _, path = saved(IMAGENET)
    imported = interop.read(path)
    other = classify.Task(**task)
    params, notes = adapt.adapt_checkpoint(
        imported, imported.model, imported.params, (12, 12), task=other
    )
    assert says(notes, '0.485', 'folded into patch_embed')
    batch = {'image': jnp.asarray(pixels, jnp.uint8)}
    expected = apply(imported.model, imported.params, *imported.task.inputs(batch))['logits']
    found = apply(imported.model, params, *other.inputs(batch))['logits']
    np.testing.assert_allclose(found, expected, atol=1e-4)
    _, notes = adapt.adapt_checkpoint(
        imported, imported.model, imported.params, (12, 12), task=imported.task
    )
    assert notes == []


def test_what_is_written_says_it(saved, tmp_path, pixels):
    """transformers' own reader gets the same model and preprocessor."""
    _, path = saved(IMAGENET)
    interop.write(anew(interop.read(path)), path / 'new')
    model = transformers.ViTForImageClassification.from_pretrained(path / 'new').eval()
    content = json.loads((path / 'new' / normalization.PREPROCESSOR).read_text())
    assert content['size'] == {'height': 12, 'width': 12}
    assert {key: content[key] for key in IMAGENET} == IMAGENET
    expected = ours(interop.read(path), normalized(pixels))['logits']
    found = theirs(model, normalized(pixels, 1 / 255, *IMAGENET.values())).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert interop.read(path / 'new').notes == ()
    assert cli.main(['convert', str(path), str(path / 'new')]) == 2


@pytest.mark.parametrize('wrong', [{'image_mean': 'half'}, {'image_std': [0, 1, 1]}])
def test_odd_numbers_are_one_line(saved, tmp_path, capsys, wrong):
    saved(IMAGENET | wrong)
    capsys.readouterr()
    assert cli.main(['convert', str(tmp_path), str(tmp_path / 'out.npz')]) == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and next(iter(wrong)) in message
