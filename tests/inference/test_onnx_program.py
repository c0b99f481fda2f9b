"""ONNX files compute what the models compute; what cannot be converted is refused in one line."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import PIL.Image
import pytest
from helpers.typechecker import unchecked

import vit_jax
from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.inference import onnx_program

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


@pytest.mark.parametrize('name', ['run_vit', pytest.param('run_swin', marks=pytest.mark.long)])
def test_an_onnx_file_predicts_as_the_run(name, tmp_path, capsys):
    pytest.importorskip('jax2onnx')
    runtime = pytest.importorskip('onnxruntime')
    folder = tmp_path / 'out'
    with unchecked():  # jax2onnx traces with arrays of its own
        assert main(['export', str(GOLDEN / name), str(folder), '--format', 'onnx']) == 0
    about = json.loads((folder / 'model.json').read_text())
    height, width, channels = about['inputs']['image'][0][1:]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, height, width, channels)).astype(np.uint8)
    session = runtime.InferenceSession(folder / 'model.onnx')
    outputs = dict(
        zip(
            about['outputs'], session.run(None, {session.get_inputs()[0].name: images}), strict=True
        )
    )
    for row, image in enumerate(images):
        photo = PIL.Image.fromarray(image.squeeze())
        expected = vit_jax.predict(GOLDEN / name, photo)['probs']
        np.testing.assert_allclose(outputs['probs'][row], expected, atol=1e-5)


def test_an_autoencoder_exports_its_encoder(tmp_path):
    pytest.importorskip('jax2onnx')
    with unchecked():
        about = onnx_program.export_onnx(GOLDEN / 'run_mae', tmp_path / 'out')
    assert about['outputs'] == ['features'] and about['model'] == 'vit'


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    out = tmp_path / 'out'
    assert main(['export', str(GOLDEN / 'run_vit'), str(out), '--format', 'onnx', '--int8']) == 2
    assert '--int8' in capsys.readouterr().err
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'jax2onnx and onnxruntime.*--no-deps'):
        onnx_program.export_onnx(GOLDEN / 'run_vit', out)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
    with pytest.raises(UserError, match=r"'detect'.*pixel_mask|--image-size"):
        onnx_program.export_onnx(GOLDEN / 'run_detr', out)
    assert not out.exists()
