"""Exported programs: the same predictions, without this package's code, for any number of rows."""

import os
import pathlib
import re

import jax
import jax.export
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import vit_jax
from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.inference import export

pytest.importorskip('flatbuffers', reason="pip install -e '.[export]'")
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden'
RUN = GOLDEN / 'run_vit'


def images_for(about, count=3):
    shape = about['inputs']['image'][0][1:]
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp('export') / 'out'
    before = os.umask(0o027)
    try:
        assert main(['export', str(RUN), str(folder)]) == 0
    finally:
        os.umask(before)
    return folder


def test_colleagues_read_what_the_umask_allows(written):
    assert written.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in written.iterdir()} == {0o640}


def test_predictions_are_those_of_the_run(written):
    exported = export.load_exported(written)
    images = images_for(exported.about)
    expected = vit_jax.predict(RUN, images)
    for found, wanted in zip(exported.predict(images), expected, strict=True):
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose(found['probs'], wanted['probs'], atol=1e-6)
    assert len(exported.class_names) == expected[0]['probs'].size


def test_plain_jax_runs_it(written):
    program = jax.export.deserialize(bytearray((written / export.PROGRAM).read_bytes()))
    weights = load_file(written / export.WEIGHTS)
    shape = export.load_exported(written).about['inputs']['image'][0][1:]
    one, five = (np.zeros((rows, *shape), np.uint8) for rows in (1, 5))
    whole = program.call(weights, {'image': five})['probs']
    assert whole.shape[0] == 5
    np.testing.assert_allclose(whole[:1], program.call(weights, {'image': one})['probs'], atol=1e-6)
    assert program.platforms == export.PLATFORMS


def test_the_page_prepares_images_without_this_package(written, tmp_path, monkeypatch, capsys):
    text = (GOLDEN.parents[1] / 'docs' / 'export.md').read_text()
    (code,) = (c for c in re.findall(r'```python\n(.*?)```', text, re.DOTALL) if 'model.json' in c)
    assert 'vit_jax' not in code
    assert main(['export', str(RUN), str(tmp_path / 'flowers'), '--image-size', '8']) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (31, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'photo.jpg')
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    (expected,) = export.load_exported('flowers').predict(['photo.jpg'])
    np.testing.assert_allclose(names['probs'], expected['probs'], atol=2e-3)
    assert capsys.readouterr().out.split()[-1] in names['about']['class_names']


def test_int8_kernels_are_near():
    rng = np.random.default_rng(0)
    shapes = {'mlp/fc1/kernel': (8, 4), 'encoder/blocks/attention/qkv/kernel': (2, 8, 3, 2, 4)}
    weights = {f'params/{k}': rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    weights['params/mlp/fc1/bias'] = np.ones(4, np.float32)
    stored = export.quantize(weights)
    assert stored['params/encoder/blocks/attention/qkv/kernel:scale'].shape == (2, 1, 3, 2, 4)
    for name, found in export.dequantize(stored).items():
        if name.endswith('kernel'):
            assert stored[name].dtype == np.int8
            half = stored[f'{name}:scale'] * 0.5001
            assert (np.abs(found - weights[name]) <= half).all()
        else:
            np.testing.assert_array_equal(found, weights[name])


@pytest.mark.parametrize(
    ('run', 'message'),
    [
        ('run_reverse', 'trained.*images'),
        ('run_siglip_naflex', 'images.*shape.*--image-size'),
        ('gone', 'no such file.*folder'),
    ],
)
def test_a_mistake_leaves_no_folder(run, message, tmp_path):
    with pytest.raises(UserError, match=message):
        export.export(GOLDEN / run, tmp_path / 'out')
    assert not list(tmp_path.iterdir())


def test_folders_are_neither_replaced_nor_taken_for_models(tmp_path):
    with pytest.raises(UserError, match='already exists'):
        export.export(RUN, tmp_path)
    with pytest.raises(UserError, match=r'model\.stablehlo'):
        export.load_exported(tmp_path)
