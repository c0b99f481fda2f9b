"""`colorize`: a chain of untrained runs, from a file to samples of another size."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions
from ml_collections import ConfigDict
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import step
from vit_jax.config.load import model_and_task
from vit_jax.errors import UserError
from vit_jax.inference import colorize as chain_lib
from vit_jax.inference import load
from vit_jax.inference.colorize import check_chain
from vit_jax.interop.trained import TrainedModel
from vit_jax.ops import colors

TINY = {'width': 8, 'num_heads': 1, 'mlp_dim': 8}
CORE = {'model': {'name': 'coltran', 'encoder_depth': 1, 'outer_depth': 1, 'inner_depth': 1}}
CORE['task'] = {'name': 'coltran'}


def upsampler(levels, factor):
    model = {'name': 'coltran_upsampler', 'levels': levels, 'depth': 1}
    return {'model': model, 'task': {'name': 'coltran_upsampler', 'factor': factor}}


def untrained(sections, side, folder):
    """Make an untrained run of a config, for images of `side` x `side` pixels."""
    data = {'source': '', 'split': '', 'transforms': f'resize({side})'}
    config = ConfigDict({**sections, 'batch_size': 1, 'data': data, 'evals': {}})
    config.model.update(TINY)
    model, task = model_and_task(config)
    batch = {'image': jnp.zeros((1, side, side, 3), jnp.uint8)}
    shapes = jax.eval_shape(lambda: step.init_variables(model, task, batch, 0))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), shapes)
    image = {'channels': 3, 'size': None}
    params, path = variables['params'], pathlib.Path(folder)
    return TrainedModel(params, config, (side, side), '', path=path, step=1, raw_images=image)


@pytest.fixture(scope='module')
def runs():
    return {
        'core': untrained(CORE, 4, 'core'),
        'color': untrained(upsampler(8, 1), 4, 'color'),
        'spatial': untrained(upsampler(256, 2), 8, 'spatial'),
    }


@pytest.fixture(scope='module')
def predictor():
    """Predictor of a run, compiled once for a task and a seed."""
    make, compiled = chain_lib.predictor, {}

    def once(run, seed):
        key = (run.path, run.task, seed)
        if key not in compiled:
            compiled[key] = make(run, seed)
        return compiled[key]

    return once


@pytest.fixture
def colorize(runs, predictor, monkeypatch, capsys, tmp_path):
    """The command on a photograph of these runs; what it prints."""
    monkeypatch.setattr(chain_lib, 'predictor', predictor)
    monkeypatch.setattr(load, 'open_run', lambda path, *args, **kwargs: runs[path])
    path = tmp_path / 'photo.png'
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (10, 16, 3), dtype=np.uint8)).save(path)

    def run(*words):
        assert cli.main(['colorize', '--workdir', 'core', *words, str(path)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_samples_go_through_the_chain(colorize, tmp_path):
    chain = ('--upsampler', 'color', '--upsampler', 'spatial')
    out = tmp_path / 'samples.png'
    printed = colorize(*chain, '--samples', '2', '--out', str(out))
    assert 'read as 8 x 8 RGB' in printed and printed.count('bits per pixel') == 2
    assert out.read_bytes().startswith(b'\x89PNG')
    colorize('--as-seen', '--samples', '2', '--out', str(out))
    (chained,) = json.loads(colorize(*chain, '--samples', '2', '--json'))
    assert [row['sample'] for row in chained['samples']] == [0, 1]
    (seed_0,) = json.loads(colorize('--json', '--samples', '2', '--seed', '0'))
    (seed_1,) = json.loads(colorize('--json', '--seed', '1'))
    likely = [
        [row['bits_per_dim'] for row in image['samples']] for image in (chained, seed_0, seed_1)
    ]
    assert likely[0] == likely[1] and len(likely[2]) == 3
    assert not {*likely[1]} & {*likely[2]}


@pytest.mark.slow
def test_a_folder_gets_an_image_of_full_size_a_sample(colorize, tmp_path):
    out = tmp_path / 'colors'
    colorize('--samples', '2', '--out', str(out))
    assert sorted(path.name for path in out.iterdir()) == ['photo_0.png', 'photo_1.png']
    photo = np.asarray(Image.open(tmp_path / 'photo.png')) / np.float32(255)
    for path in out.iterdir():
        images = np.asarray(Image.open(path)) / np.float32(255)
        assert images.shape == photo.shape and np.abs(images - photo).max() > 0.05
        luminances = colors.to_gray(images), colors.to_gray(photo)
        np.testing.assert_allclose(*luminances, atol=1.5 / 255)
    colorize('--samples', '2', '--as-seen', '--out', str(tmp_path / 'seen'))
    assert Image.open(tmp_path / 'seen' / 'photo_0.png').size == (4, 4)


def test_no_file_given_is_written_over(colorize, tmp_path, capsys):
    Image.new('L', (4, 4)).save(tmp_path / 'photo_1.png')
    flags = ['--samples', '2', '--out', str(tmp_path), str(tmp_path / 'photo_1.png')]
    files = ('photo.png', 'photo_1.png')
    before = [(tmp_path / name).read_bytes() for name in files]
    argv = ['colorize', '--workdir', 'core', *flags, str(tmp_path / 'photo.png')]
    assert cli.main(argv) == 2
    assert mentions(capsys.readouterr().err, 'photo_1.png', 'overwrite')
    assert [(tmp_path / name).read_bytes() for name in files] == before
    assert not (tmp_path / 'photo_0.png').exists()


@pytest.mark.parametrize('task', ['colorize', 'classify'])
def test_a_run_of_another_task_is_refused(runs, monkeypatch, capsys, tmp_path, task):
    config = runs['core'].config.copy_and_resolve_references()
    config.task = {'name': task}
    other = dataclasses.replace(runs['core'], config=config)
    monkeypatch.setattr(load, 'open_run', lambda *args, **kwargs: other)
    flags = ['--samples', '2', '--out', str(tmp_path / 'colors'), str(tmp_path / 'a.png')]
    assert cli.main(['colorize', '--workdir', 'core', *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("'core'", f"'{task}'", "'coltran'", 'predict'))


def test_a_chain_must_fit_together(runs):
    check_chain(runs['core'], [runs['color'], runs['spatial']])
    with pytest.raises(UserError, match=r"--workdir 'color'.* 'coltran_ups"):
        check_chain(runs['color'], [])
    with pytest.raises(UserError, match=r"--upsampler 'core'.* 'coltran'"):
        check_chain(runs['core'], [runs['core']])
    larger = dataclasses.replace(runs['core'], image_size=(8, 8))
    with pytest.raises(UserError, match=r'4 x 4.*8'):
        check_chain(larger, [runs['color']])
