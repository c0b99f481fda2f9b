"""Images from images: what is given, who sees it, mistakes, numbers of the evaluator, pictures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jit_numbers
from helpers.applies import Given
from helpers.jit_numbers import MODEL
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.evaluators import restoration
from vit_jax.ops import colors, fidelity, terms
from vit_jax.tasks import generate
from vit_jax.tasks.image_to_image import Task

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (3, 8, 12, 3), dtype=np.uint8)
BATCH = jit_numbers.batch()


def condition_from(task, images):
    return np.asarray(task.to_bytes(task.inputs({'image': jnp.asarray(images)})[3]))


def test_small_images_are_the_mean_colors_of_blocks():
    """As Pillow's `reduce`, to a level."""
    conditions = condition_from(Task(given='small', factor=4), BYTES)
    for image, condition in zip(BYTES, conditions, strict=True):
        small = np.asarray(Image.fromarray(image).reduce(4)).astype(int)
        assert np.abs(condition - small.repeat(4, axis=0).repeat(4, axis=1)).max() <= 1


def test_gray_images_have_the_luminance():
    condition = condition_from(Task(), BYTES)
    gray = np.asarray(colors.to_bytes(colors.to_gray(BYTES / np.float32(255))))
    np.testing.assert_array_equal(condition, gray)
    gray_images = BYTES[..., :1].repeat(3, axis=-1)
    np.testing.assert_array_equal(condition_from(Task(), gray_images), gray_images[..., :1])


@pytest.mark.slow
def test_every_noisy_image_is_seen_beside_what_is_given_of_its_own():
    """A model that returns what it is given: each sample, also of pairs for guidance, is that."""
    task = Task(given='small', factor=4, steps=3, samples=2, guidance=2.0)

    def apply(z, time=None, labels=None, given=None, method=None):
        if method:
            return jax.random.split(jax.random.key(0), z)
        return {'image': given}

    batch = {'image': jnp.asarray(BYTES), 'label': jnp.arange(3)}
    found = task.predict(Given(apply), batch)
    assert found['samples'].shape == (3, 2, 8, 12, 3)
    given = np.asarray(found['given'])
    assert np.abs(np.asarray(found['samples']).astype(int) - given[:, None]).max() <= 1
    assert (task.inputs(batch)[2] == generate.NO_CLASS).all()
    outputs = task.outputs(Given(apply), batch)
    np.testing.assert_array_equal(task.to_bytes(outputs['prediction']), given)


@functools.cache
def padded():
    """Parameters of a model for one more channel, which they leave out."""
    params = jit_numbers.params()
    kernel = params['patch_embed']['kernel']
    shape = (*kernel.shape[:2], 1, kernel.shape[3])
    kernel = jnp.concatenate([kernel, jnp.zeros(shape)], axis=2)
    return {**params, 'patch_embed': {'kernel': kernel}}


@pytest.mark.long
def test_a_model_that_leaves_out_what_is_given_is_that_of_the_authors_code():
    """The loss of images without classes, as the model without further channels has it."""

    def loss(task, params):
        batch = {name: BATCH[name] for name in ('image', 'time', 'noise')}
        apply = step.bind(MODEL, task, {'params': params}, batch)
        return float(terms.means(task.loss(task.outputs(apply, batch), batch))['loss'])

    expected = loss(generate.Task(), jit_numbers.params())
    assert loss(Task(), padded()) == pytest.approx(expected, rel=1e-6)
    seen = {**padded(), 'patch_embed': {'kernel': padded()['patch_embed']['kernel'] + 0.1}}
    assert loss(Task(), seen) != pytest.approx(expected, rel=1e-2)


def test_mistakes():
    with pytest.raises(UserError, match="given 'grey'"):
        Task(given='grey')
    with pytest.raises(UserError, match=r'factor=1.*2'):
        Task(factor=1)
    with pytest.raises(UserError, match=r'factor=.*12 x 8'):
        Task(given='small', factor=3).inputs({'image': jnp.asarray(BYTES)})
    with pytest.raises(UserError, match=r"given='gray'.*3 channels"):
        Task().inputs({'image': jnp.asarray(BYTES[..., :1])})


def test_the_evaluator_has_the_numbers_of_the_colors():
    evaluator = restoration.Evaluator()
    samples = RNG.integers(0, 256, (3, 2, 8, 12, 3), dtype=np.uint8)
    gray = condition_from(Task(), BYTES)
    for rows in (slice(0, 2), slice(2, 3)):
        made = {'samples': samples[rows], 'image': BYTES[rows], 'given': gray[rows]}
        evaluator.update(made, {})
    found = evaluator.result()
    images = samples, BYTES, gray.repeat(3, axis=-1), BYTES[:, None].repeat(2, axis=1)
    floats = [x.astype(np.float32) / 255 for x in images]
    expected = {
        'psnr': fidelity.psnr(floats[0], floats[3]).mean(),
        'psnr_of_given': fidelity.psnr(floats[2], floats[1]).mean(),
        'colorfulness': fidelity.colorfulness(floats[0]).mean(),
        'true_colorfulness': fidelity.colorfulness(floats[1]).mean(),
    }
    assert found == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)
    evaluator.update({**made, 'finite': np.array([[True, False]])}, {})
    assert np.isnan(list(evaluator.result().values())).all()
    with pytest.raises(UserError, match="'image_to_image'"):
        evaluator.update({'samples': samples}, {})


@pytest.mark.slow
def test_a_run_colors_a_photograph(repo, tmp_path, monkeypatch, one_device, capsys):
    monkeypatch.chdir(repo)
    run, photo = str(tmp_path / 'run'), str(tmp_path / 'photo.png')
    words = ['--config.total=2 steps', '--config.data.source=scenes:32', '--config.task.steps=2']
    words += ['--config.model.depth=1']
    config = ['--config', 'experiments/jit/restore.py:smoke', '--config.evals.test.split=test[:4]']
    assert cli.main(['train', *config, *words, '--workdir', run]) == 0
    Image.fromarray(RNG.integers(0, 256, (60, 50, 3), dtype=np.uint8)).save(photo)
    predict = ['predict', '--workdir', run, photo, '--samples', '2']
    assert cli.main([*predict, '--out', str(tmp_path / 'drawn.png')]) == 0
    assert Image.open(tmp_path / 'drawn.png').width > 3 * Image.open(tmp_path / 'drawn.png').height
    assert cli.main([*predict, '--out', str(tmp_path / 'images')]) == 0
    assert Image.open(tmp_path / 'images' / 'photo.png').size == (50, 60)
    assert cli.main(['sample', run, '--out', str(tmp_path / 'x.png')]) == 2
    error = capsys.readouterr().err
    assert run in error and 'predict' in error
