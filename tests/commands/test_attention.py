"""`attention`: one picture of where a run looks."""

import jax
import numpy as np
import pytest
from helpers.messages import mentions, numbers, says
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.commands import attention
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.inference.predict import predict_with_attention
from vit_jax.viz.attention_pictures import caption, choose_stack, stack_weights


@pytest.fixture
def photo(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / 'photo.png')
    return tmp_path / 'photo.png'


@pytest.mark.slow
def test_one_picture(smoke_run, photo, tmp_path, capsys):
    out = tmp_path / 'new' / 'out.png'
    argv = ['attention', '--workdir', smoke_run, photo, '--out', out, '--query', '3,0']
    assert cli.main([str(word) for word in argv]) == 0
    line = capsys.readouterr().out.removeprefix(f'{out}: ')
    assert numbers(line) == [1, 4, 4, 4, 60, 40, 8, 8, 0, 40, 10, 50]
    assert says(line, 'layers', 'heads', 'patches', 'gray', 'cropped')
    with Image.open(out) as picture:
        assert min(picture.size) > 500


@pytest.mark.slow
def test_weights_belong_to_the_prediction(smoke_run):
    run = load.open_run(smoke_run)
    image = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 1), dtype=np.uint8)
    outputs, maps = predict_with_attention(run, {'image': image})
    weights = stack_weights(choose_stack(maps))
    expected = jax.jit(run.model.apply)(run.variables, image / np.float32(127.5) - 1)
    np.testing.assert_allclose(outputs['logits'], expected['logits'], atol=1e-5)
    assert weights.shape == (1, 4, 16, 16)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_mistakes_are_one_line(smoke_run, photo, tmp_path, capsys, monkeypatch):
    out, predictions = str(tmp_path / 'out.png'), {}

    def look_once(run, batch):  # at images of this size
        shape = batch['image'].shape
        if shape not in predictions:
            predictions[shape] = predict_with_attention(run, batch)
        return predictions[shape]

    monkeypatch.setattr('vit_jax.inference.predict.predict_with_attention', look_once)
    (tmp_path / 'file').write_text('')
    for flags, message in [
        (['--out', out, '--query', 'dog'], 'ROW,COL'),
        (['--out', out, '--query', '4,0'], ('4 rows', '4 columns')),
        (['--out', out, '--query', '4'], ('4 rows', '4 columns')),
        (['--out', out, '--layer', '1'], ('layer', '1')),
        ([str(photo), '--out', out], 'give one image'),
        (['--out', out, '--head', '1'], ('heads', 'layer')),
        (['--out', out, '--map', 'decoder'], "unknown attention map 'decoder'"),
        (['--out', out, '--map', '('], ("'('", 'expression')),
        (['--out', out, '--image-size', '9'], 'patch_size'),
        (['--out', out, '--image-size', '0'], '--image-size 0'),
        (['--out', str(tmp_path / 'out.bmp')], 'must end in .png'),
        (['--out', str(tmp_path / 'file' / 'out.png')], 'cannot be written'),
    ]:
        assert cli.main(['attention', '--workdir', str(smoke_run), str(photo), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1
        assert mentions(captured.err, message)
    assert not (tmp_path / 'out.png').exists()


def test_queries():
    assert attention.parse_query(None) is None
    assert attention.parse_query('cls') == ()
    assert attention.parse_query('2,13') == (2, 13)
    assert attention.parse_query('7') == (7,)
    for wrong in ('', '2,', '-1,2', '2,3,4'):
        with pytest.raises(UserError, match='ROW,COL'):
            attention.parse_query(wrong)


def test_captions():
    logits = np.array([[0.0, 2.0, 1.0]])
    assert caption('a.png', {'logits': logits}, ('x', 'dog', 'y')) == 'a.png: dog'
    assert caption('a.png', {'logits': logits}, ()) == 'a.png'
    assert caption('a.png', {'tokens': logits}, ('x', 'dog', 'y')) == 'a.png'
