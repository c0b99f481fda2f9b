"""Commands on the weights of other code bases, in place of a run."""

import json

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax.data.sources import open_source
from vit_jax.inference import load
from vit_jax.inference.predict import predict_with_attention
from vit_jax.interop import files
from vit_jax.interop.families import bit, vision_transformer
from vit_jax.models import bit_resnet, hybrid, vit
from vit_jax.viz.attention_pictures import choose_stack, stack_weights

pytestmark = pytest.mark.usefixtures('one_device')

VIT = dict(num_classes=10, patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)
HYBRID = VIT | dict(patch_size=1, layers=(1,), width=32)
BIT = dict(num_classes=10, layers=(1,))


def random_params(model, size):
    images = jax.ShapeDtypeStruct((1, *size), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), shapes)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A gray ViT for 8 x 8 digits, a hybrid and a BiT in color, and a photo."""
    path = tmp_path_factory.mktemp('foreign')
    fixed = VIT | {'posemb': 'sincos2d'}
    flat = vision_transformer.write(
        random_params(vit.Model(**fixed), (8, 8, 1)), {'name': 'vit', **fixed}
    )
    files.write_npz(path / 'fixed.npz', flat)
    params = random_params(vit.Model(**VIT), (8, 8, 1))
    files.write_npz(path / 'vit.npz', vision_transformer.write(params, {'name': 'vit', **VIT}))
    params = random_params(hybrid.Model(**HYBRID), (16, 16, 3))
    flat = vision_transformer.write(params, {'name': 'hybrid', **HYBRID})
    files.write_npz(path / 'hybrid.npz', flat)
    params = random_params(bit_resnet.Model(**BIT), (32, 32, 3))
    files.write_npz(path / 'bit.npz', bit.write_npz(params))
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(image).save(path / 'photo.png')
    return path


def call(*argv):
    return cli.main([str(word) for word in argv])


def logits(path, images):
    run = load.open_model(path)
    inputs = images.astype(np.float32) / 127.5 - 1
    return np.asarray(jax.jit(run.model.apply)(run.variables, inputs)['logits'])


@pytest.mark.slow
def test_predict(folder, capsys):
    digit = open_source('digits', 'test')[0]['image']
    Image.fromarray(digit[..., 0]).save(folder / 'digit.png')
    argv = ['predict', '--checkpoint', folder / 'vit.npz', folder / 'digit.png', '--json']
    assert call(*argv) == 0
    output = json.loads(capsys.readouterr().out)
    assert output['step'] is None
    result = output['images'][0]
    assert says(result['read_as'], '8 x 8', 'gray')
    expected = np.asarray(jax.nn.softmax(logits(folder / 'vit.npz', digit[None])[0]))
    best = int(expected.argmax())
    assert (result['predictions'][0]['label'], result['predictions'][0]['class']) == (
        best,
        f'class {best}',
    )
    assert result['predictions'][0]['probability'] == pytest.approx(expected.max(), rel=1e-4)


@pytest.mark.slow
def test_evaluate(folder, capsys):
    source = open_source('digits', 'test[:50]')
    images = np.stack([source[i]['image'] for i in range(50)])
    expected = (logits(folder / 'vit.npz', images).argmax(-1) == source.labels()).mean()
    argv = ['evaluate', '--checkpoint', folder / 'vit.npz', '--source', 'digits']
    assert call(*argv, '--split', 'test[:50]', '--json') == 0
    output = json.loads(capsys.readouterr().out)
    assert output['step'] is None
    assert output['test[:50]/accuracy'] == pytest.approx(expected)
    assert call(*argv, '--split', 'test[:50]') == 0
    assert capsys.readouterr().out.startswith('test[:50]/')


@pytest.mark.slow
def test_inspect(folder, capsys):
    assert call('inspect', '--checkpoint', folder / 'vit.npz', '--json') == 0
    small = json.loads(capsys.readouterr().out)
    run = load.open_model(folder / 'vit.npz')
    assert small['total'] == sum(x.size for x in jax.tree.leaves(run.variables))
    assert small['inputs'] == [[8, 8, 1]]
    argv = ['inspect', '--checkpoint', folder / 'vit.npz', '--image-size', 16, '--json']
    assert call(*argv) == 0
    large = json.loads(capsys.readouterr().out)
    assert large['inputs'] == [[16, 16, 1]]
    assert large['total'] - small['total'] == 12 * 16  # rows of pos_embed
    assert large['flops']['forward'] > 3 * small['flops']['forward']


@pytest.mark.slow
def test_an_unknown_size_must_be_given(folder, capsys):
    argv = ['--checkpoint', folder / 'fixed.npz']
    assert call('inspect', *argv) == 0
    assert 'give --image-size' in capsys.readouterr().out
    assert call('predict', *argv, '--image-size', 8, folder / 'photo.png') == 0
    assert '8 x 8 gray' in capsys.readouterr().out
    data = ['--source', 'digits', '--split', 'test', '--json']
    assert call('evaluate', *argv, *data, '--image-size', 8) == 0
    at_8 = json.loads(capsys.readouterr().out)
    assert call('evaluate', *argv, *data, '--image-size', 12) == 0
    assert json.loads(capsys.readouterr().out)['test/loss'] != at_8['test/loss']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'flags', 'grid', 'read_as'),
    [
        (
            'vit.npz',
            ['--image-size', 'width=24,height=16', '--query', '3,5'],
            '6 x 4',
            '24 x 16 gray',
        ),
        pytest.param(
            'hybrid.npz',
            [],
            '4 x 4',
            '16 x 16 RGB, cropped to rows 0-40, columns 10-50',
            marks=pytest.mark.long,
        ),
        (
            'hybrid.npz',
            ['--image-size', 'height=8,width=20', '--query', '1,4'],
            '5 x 2',
            '20 x 8 RGB, cropped to rows 8-32, columns 0-60',
        ),
    ],
)
def test_attention_of_imported_models(folder, tmp_path, capsys, name, flags, grid, read_as):
    out = tmp_path / 'out.png'
    argv = ['attention', '--checkpoint', folder / name, folder / 'photo.png', '--out', out]
    assert call(*argv, *flags) == 0
    facts = '1 layers x 2 heads', f'{grid} patches', '60 x 40', read_as
    assert says(capsys.readouterr().out, out, *facts)
    with Image.open(out) as picture:
        assert min(picture.size) > 300


@pytest.mark.slow
def test_attention_weights_are_of_the_resized_model(folder):
    run = load.open_model(folder / 'vit.npz', (12, 20))
    batch = {'image': np.random.default_rng(0).integers(0, 256, (1, 12, 20, 1), np.uint8)}
    outputs, maps = predict_with_attention(run, batch)
    weights = stack_weights(choose_stack(maps))
    assert weights.shape == (1, 2, 16, 16)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    expected = jax.jit(run.model.apply)(run.variables, batch['image'] / np.float32(127.5) - 1)
    np.testing.assert_allclose(outputs['logits'], expected['logits'], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['attention', '--checkpoint', 'bit.npz'], ("'bit_resnet'", 'attention')),
        (['attention', '--checkpoint', 'vit.npz', '--image-size', '10'], '10 x 10'),
        (['attention', '--checkpoint', 'vit.npz', '--image-size', '8x'], 'width=320,height=224'),
        (
            ['attention', '--checkpoint', 'vit.npz', '--image-size', '8x20'],
            'width=20,height=8',
        ),
        (
            ['attention', '--checkpoint', 'vit.npz', '--query', '2,0'],
            ('2 rows', '2 columns'),
        ),
        (['attention'], 'input'),
        (
            ['attention', '--checkpoint', 'vit.npz', '--step', '3'],
            ('--step', '--average'),
        ),
        (['predict', '--checkpoint', 'no.npz'], 'no.npz'),
        (['predict', '--checkpoint', 'fixed.npz'], 'give --image-size'),
        (['evaluate', '--checkpoint', 'vit.npz'], 'give --source and --split'),
        (
            ['evaluate', '--checkpoint', 'bit.npz', '--source', 'digits', '--split', 'test'],
            ('3 channels', '1'),
        ),
        (
            ['evaluate', '--checkpoint', 'small.npz', '--source', 'digits', '--split', 'test'],
            ('10 classes', '4'),
        ),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, argv, message):
    if 'small.npz' in argv:
        fields = VIT | {'num_classes': 4}
        params = random_params(vit.Model(**fields), (8, 8, 1))
        flat = vision_transformer.write(params, {'name': 'vit', **fields})
        files.write_npz(folder / 'small.npz', flat)
    argv = [folder / word if word.endswith('.npz') else word for word in argv]
    if argv[0] != 'evaluate':
        argv.append(folder / 'photo.png')
    if argv[0] == 'attention':
        argv += ['--out', tmp_path / 'out.png']
    assert call(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('error: ')
    assert captured.err.count('\n') == 1
    assert mentions(captured.err, message)
    assert not (tmp_path / 'out.png').exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_learned_embedding_of_a_run_is_resized(repo, folder, tmp_path, capsys):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    changes = ['total=1 steps', 'model.posemb=learn', 'model.pool=cls', 'model.depth=1']
    # Images that are mixed take longer to compile than all the rest.
    flags = [f'--config.{change}' for change in (*changes, 'task.mixup=0')]
    assert call('train', '--config', config, *flags, '--workdir', tmp_path / 'run') == 0
    capsys.readouterr()
    out = tmp_path / 'out.png'
    argv = ['attention', '--workdir', tmp_path / 'run', folder / 'photo.png', '--out', out]
    assert call(*argv, '--image-size', 'width=10,height=6', '--query', '2,4') == 0
    assert mentions(capsys.readouterr().out, '5 x 3', '60 x 40', '10 x 6')
    assert call(*argv, '--image-size', '7') == 2
    assert '7 x 7' in capsys.readouterr().err
