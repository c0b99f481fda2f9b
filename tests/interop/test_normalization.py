"""Mean and standard deviation of a checkpoint's images: read, folded, written, or unknown."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import drawn
from helpers.transformers_models import theirs
from helpers.transformers_vit import ours, reference

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files, preprocessing
from vit_jax.interop.families import bit, vision_transformer
from vit_jax.models import bit_resnet, vit

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
            (tmp_path / preprocessing.PREPROCESSOR).write_text(json.dumps(content))
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
def test_what_the_preprocessor_says_is_folded(saved, pixels, says, numbers):
    model, path = saved(says)
    imported = interop.read(path)
    expected = theirs(model, normalized(pixels, *numbers)).logits
    logits = ours(imported, normalized(pixels))['logits']
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert imported.notes == ()
    if numbers[1:] == (0.5, 0.5):  # bit for bit
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
    with pytest.raises(UserError, match='2 colors, the model takes 3'):
        vit_jax.load(path, mean=[0.1, 0.2], std=1)


def test_a_run_has_no_normalization(smoke_run):
    with pytest.raises(UserError, match='not for a run'):
        vit_jax.load(smoke_run, mean=0, std=1)


def test_where_nothing_tells_it_is_said(saved, tmp_path, capsys, caplog):
    saved(None)
    assert cli.main(['convert', str(tmp_path), str(tmp_path / 'out.npz')]) == 0
    assert f'note: {preprocessing.UNKNOWN_NORMALIZATION}\n' in capsys.readouterr().out
    vit_jax.load(tmp_path)
    assert preprocessing.UNKNOWN_NORMALIZATION in caplog.text


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


def test_what_cannot_be_folded_is_said(tmp_path):
    model = bit_resnet.Model(num_classes=3, layers=(1,))
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
    keywords = {'name': 'bit_resnet', 'layers': (1,), 'num_classes': 3}
    trained = interop.TrainedModel.from_file(params, keywords, None, 'a test')
    files.write_safetensors(tmp_path, *bit.write_transformers(trained)[:2], IMAGENET)
    assert 'mean 0.485, 0.456, 0.406' in interop.read(tmp_path).notes[0]
    with pytest.raises(UserError, match='cannot be folded'):
        vit_jax.load(tmp_path, mean=0, std=1)


def test_what_is_written_says_it(saved, tmp_path, pixels):
    """The folded model, with transformers' own reader and its own preprocessor."""
    _, path = saved(IMAGENET)
    assert cli.main(['convert', str(path), str(path / 'new')]) == 0
    model = transformers.ViTForImageClassification.from_pretrained(path / 'new').eval()
    content = json.loads((path / 'new' / preprocessing.PREPROCESSOR).read_text())
    assert content['size'] == {'height': 12, 'width': 12}
    assert (content['image_mean'], content['image_std']) == ([0.5] * 3, [0.5] * 3)
    expected = ours(interop.read(path), normalized(pixels))['logits']
    np.testing.assert_allclose(theirs(model, normalized(pixels)).logits, expected, atol=1e-4)
    assert interop.read(path / 'new').notes == ()
    assert cli.main(['convert', str(path), str(path / 'new')]) == 2


@pytest.mark.parametrize('wrong', [{'image_mean': 'half'}, {'image_std': [0, 1, 1]}])
def test_odd_numbers_are_one_line(saved, tmp_path, capsys, wrong):
    saved(IMAGENET | wrong)
    capsys.readouterr()
    assert cli.main(['convert', str(tmp_path), str(tmp_path / 'out.npz')]) == 2
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and next(iter(wrong)) in message
