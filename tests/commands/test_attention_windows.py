"""`attention` of a model with windows: laid back onto the image, and its learned biases."""

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.inference.predict import predict_with_attention
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.swin import Model

FIELDS = {
    'num_classes': 3,
    'patch_size': 2,
    'width': 8,
    'depths': (2, 1),
    'num_heads': (2, 4),
    'window': 3,
}


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A Swin for images of 12 pixels in the form of transformers."""
    model, rng = Model(**FIELDS), np.random.default_rng(0)
    images = jax.ShapeDtypeStruct((1, 12, 12, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
    keywords = {'name': 'swin', 'mlp_ratio': 4.0, 'gelu': 'erf', 'norm_eps': 1e-5, **FIELDS}
    path = tmp_path_factory.mktemp('windows') / 'swin'
    interop.write(TrainedModel.from_file(params, keywords, (12, 12), 'a test'), path)
    return path


@pytest.fixture
def photo(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / 'photo.png')
    return tmp_path / 'photo.png'


@pytest.fixture(scope='module')
def predictions():
    """Predictions of the model for the photo, computed once."""
    return []


@pytest.fixture
def look_once(predictions, monkeypatch):
    def once(run, batch):
        predictions[:] = predictions or [predict_with_attention(run, batch)]
        return predictions[0]

    monkeypatch.setattr('vit_jax.inference.predict.predict_with_attention', once)


def run(*argv):
    return cli.main([str(word) for word in ('attention', *argv)])


@pytest.mark.slow
@pytest.mark.usefixtures('look_once')
@pytest.mark.parametrize(
    ('stage', 'query', 'drawn'),
    [
        ('stage_0', '4,1', '2 layers x 2 heads, 6 x 6'),
        ('stage_1', '2,2', '1 layers x 4 heads, 3 x 3'),
    ],
)
def test_windows_are_laid_back(checkpoint, photo, capsys, stage, query, drawn):
    out = photo.with_name('out.png')
    flags = ('--map', stage, '--query', query, '--out', out)
    assert run('--checkpoint', checkpoint, photo, *flags) == 0
    assert says(capsys.readouterr().out, out, f'{drawn} patches', '60 x 40', '12 x 12 RGB')
    with Image.open(out) as picture:
        assert min(picture.size) > 500


@pytest.mark.slow
def test_biases_are_drawn_without_an_input(checkpoint, tmp_path, capsys):
    out = tmp_path / 'bias.png'
    for flags, line in [
        (('--parameters', ''), 'stage_0/block_0/attention/position_bias and 2 more'),
        (('--parameters', 'stage_1', '--head', 3), 'stage_1/block_0/attention/position_bias'),
    ]:
        assert run('--checkpoint', checkpoint, '--out', out, *flags) == 0
        assert capsys.readouterr().out == f'{out}: {line}\n'
        assert out.exists()
        out.unlink()


@pytest.mark.slow
def test_mistakes_are_one_line(checkpoint, smoke_run, photo, tmp_path, capsys):
    out = tmp_path / 'out.png'
    swin, vit = ('--checkpoint', checkpoint), ('--workdir', smoke_run)
    for flags, message in [
        ((*swin, '--parameters', '', photo), '--parameters'),
        ((*swin, '--parameters', '', '--query', '1,1'), '--parameters'),
        ((*swin, '--parameters', 'neck'), "unknown parameter 'neck'"),
        ((*swin, '--parameters', '('), ("'('", 'expression')),
        ((*swin, '--parameters', 'stage_0', '--head', 2), ('head', '2')),
        ((*vit, '--parameters', 'head'), "unknown parameter 'head'"),
        (swin, 'required: input'),
    ]:
        assert run(*flags, '--out', out) == 2
        captured = capsys.readouterr()
        assert captured.out == '' and captured.err.count('\n') == 1
        assert captured.err.startswith('error: ') and mentions(captured.err, message)
    assert not out.exists()
