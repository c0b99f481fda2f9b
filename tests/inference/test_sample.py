"""Sampling: the same image on any devices and in any batch, classes, files, mistakes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import jit_numbers
from helpers.messages import mentions
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.inference import sample
from vit_jax.inference.predict import predictor
from vit_jax.interop.trained import TrainedModel

pytestmark = pytest.mark.slow
TASK = {'name': 'generate', 'steps': 4, 'guidance': 2.0}


def trained(**changes):
    """The model of the reference's numbers, as a record."""
    fields = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'bottleneck')
    fields += ('context_tokens', 'context_start', 'num_classes')
    model = {'name': 'jit', **{name: getattr(jit_numbers.MODEL, name) for name in fields}}
    params = jax.tree.map(np.asarray, jit_numbers.params())
    task = TASK | changes
    return TrainedModel.from_file(params, model, (8, 8), 'test', task=task)


def images(run, *args, **options):
    found = list(sample.sample(run, *args, **options))
    return np.concatenate([batch.images for batch in found]).astype(int)


@pytest.fixture(scope='module')
def one():
    return images(trained(), (3, 0), 5, seed=1, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ('devices', 'batch'),
    [(8, 16), *(pytest.param(*x, marks=pytest.mark.long) for x in ((2, 4), (1, 3)))],
)
def test_devices_and_batches_do_not_change_an_image(one, devices, batch):
    options = {'seed': 1, 'batch_size': batch, 'devices': jax.devices()[:devices]}
    found = images(trained(), (3, 0), 5, **options)
    assert found.shape == one.shape == (10, 8, 8, 3)
    assert np.abs(found - one).max() <= 1
    assert (found == one).mean() > 0.99


def test_an_image_is_that_of_its_seed_class_and_number(one):
    options = {'devices': jax.devices()[:1], 'batch_size': 10}
    fewer = images(trained(), (0,), 2, seed=1, **options)
    assert np.abs(fewer - one[5:7]).max() <= 1
    other = images(trained(), (3, 0), 5, seed=2, **options)
    assert np.abs(other - one).mean() > 5
    assert np.abs(one[:5] - one[5:]).mean() > 5


def test_all_classes_and_frames_by_default():
    batches = list(sample.sample(trained(), frames=3, devices=jax.devices()[:1], batch_size=4))
    assert np.concatenate([batch.labels for batch in batches]).tolist() == [0, 1, 2, 3, 4]
    assert [batch.frames.shape for batch in batches] == [(4, 3, 8, 8, 3), (1, 3, 8, 8, 3)]


def test_mistakes_of_calls():
    for classes, count, options, words in (
        ((5,), 1, {}, 'class 5: .* 0 to 4'),
        ((1,), 100_000, {}, '100,000 images .* 65,536'),
        ((1,), 1, {'frames': 4}, '4 .*images .* 4 steps'),
    ):
        with pytest.raises(UserError, match=words):
            sample.sample(trained(), classes, count, **options)
    for classes, guidance in (((1,), 2.0), ((-1,), 1.0)):  # the missing class has not been trained
        run = trained(class_dropout=0.0, guidance=guidance)
        with pytest.raises(UserError, match='class_dropout'):
            sample.sample(run, classes, 1)
    run = trained(class_dropout=0.0, guidance=1.0)
    assert images(run, (1,), 1, devices=jax.devices()[:1]).shape == (1, 8, 8, 3)
    other = trained().with_groups(task={'name': 'classify'})
    with pytest.raises(UserError, match=r"task 'classify'.* 'generate'"):
        sample.sample(other)


def test_a_model_that_has_diverged_makes_no_images():
    run = trained(steps=1)
    params = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), run.params)
    run = dataclasses.replace(run, params=params)
    image = {'image': np.zeros((8, 8, 3), np.uint8)}
    for make in (
        lambda: next(sample.sample(run, (1,), devices=jax.devices()[:1])),
        lambda: predictor(run)(image, 0),
    ):
        with pytest.raises(UserError, match=r'NaN .* --step'):
            make()


@pytest.fixture(scope='module')
def folder(repo):
    return str(repo / 'tests/golden/run_jit')


def test_a_folder_an_array_and_pictures(folder, tmp_path, capsys, one_device):
    few = ['sample', folder, '--classes', '3,none', '--count', '2', '--steps', '2', '--seed', '5']
    assert cli.main([*few, '--out', str(tmp_path / 'images')]) == 0
    files = sorted(path.name for path in (tmp_path / 'images').iterdir())
    assert files == ['0003_00000.png', '0003_00001.png', 'none_00000.png', 'none_00001.png']
    assert cli.main([*few, '--out', str(tmp_path / 'all.npz')]) == 0
    arrays = np.load(tmp_path / 'all.npz')
    assert arrays['arr_0'].shape == (4, 8, 8, 3) and arrays['arr_0'].dtype == np.uint8
    assert arrays['arr_1'].tolist() == [3, 3, -1, -1]
    first = np.asarray(Image.open(tmp_path / 'images' / '0003_00000.png'))
    np.testing.assert_array_equal(first, arrays['arr_0'][0])
    capsys.readouterr()
    words = ['--trajectory', '--json', '--out', str(tmp_path / 'way.png')]
    assert cli.main([*few, '--sampler', 'euler', *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['classes'] == [3, -1] and found['sampler'] == 'euler' and found['steps'] == 2
    assert Image.open(tmp_path / 'way.png').width > Image.open(tmp_path / 'way.png').height / 3
    assert cli.main([*few, '--out', str(tmp_path / 'grid.png')]) == 0


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--out', 'x.png', '--classes', 'seven'], "unknown class 'seven'"),
        (['--out', 'x.png', '--classes', '10'], ('class', '10')),
        (['--out', 'x.gif'], 'x.gif'),
        (['--out', 'x.npz', '--trajectory'], '--trajectory is drawn'),
        (['--out', 'x.png', '--steps', '1', '--trajectory'], ('--trajectory', '--steps 2')),
        (['--out', 'x.png', '--steps', '0'], ('steps=0', '1')),
        (['--out', 'x.png', '--guidance', 'nan'], ('guidance=nan', '0')),
        (['--out', 'x.png', '--count', '200'], ('2,000', 'images')),
        (['--out', 'x.png', '--workdir', 'runs/a'], 'unexpected'),
    ],
)
def test_mistakes_are_one_line(folder, words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(['sample', folder, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert mentions(error, said) and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_run_of_another_task_is_refused(repo, capsys):
    assert cli.main(['sample', str(repo / 'tests/golden/run_vit'), '--out', 'x.png']) == 2
    error = capsys.readouterr().err
    assert 'run_vit' in error and "'classify'" in error and "'generate'" in error


def made(numbers):
    """Gray batches of two images."""
    for number in numbers:
        if number is None:
            raise RuntimeError
        images = np.full((2, 4, 4, 1), number, np.uint8)
        yield sample.Samples(images, images[:, :0], np.full(2, number), np.arange(2))


def test_an_array_is_written_batch_by_batch_and_appears_whole(tmp_path):
    sample.write_npz(tmp_path / 'a.npz', made([3, 5]), 4)
    with np.load(tmp_path / 'a.npz') as arrays:
        assert arrays['arr_1'].tolist() == [3, 3, 5, 5]
        assert arrays['arr_0'].shape == (4, 4, 4, 3)
        assert (arrays['arr_0'] == arrays['arr_1'][:, None, None, None]).all()
    with pytest.raises(RuntimeError):
        sample.write_npz(tmp_path / 'b.npz', made([3, None]), 4)
    assert [path.name for path in tmp_path.iterdir()] == ['a.npz']
