"""`config.init`: a new run that starts from a checkpoint, its own kind's or another code base's."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util
from helpers.messages import mentions, says
from ml_collections import ConfigDict

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.checkpoints import format as checkpoint_format
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import vision_transformer
from vit_jax.interop.trained import TrainedModel, read_classes, take_classes
from vit_jax.models import vit
from vit_jax.trainer import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once')]

MODEL = dict(patch_size=2, width=16, depth=1, num_heads=2, mlp_dim=24, pool='cls', posemb='learn')
DATA = dict(source='digits', cache=True, workers=0)
TWO_STEPS = '2 steps'


def make_config():
    return ConfigDict(
        dict(
            seed=0,
            total=TWO_STEPS,
            batch_size=16,
            model=dict(name='vit', num_classes=10, **MODEL),
            task=dict(name='classify'),
            data=dict(split='train[:64]', **DATA),
            evals={},
            optim=dict(name='sgd', lr=1e-30, schedule=dict(name='constant')),
            step=dict(ema_decay=0.5),
            every=dict(log='1', checkpoint='1'),
            checkpoint={},
            parallel=dict(strategy='jit'),
        )
    )


@pytest.fixture
def config():
    """Two steps of a tiny ViT with a learned position embedding, at a step size of zero."""
    return make_config()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of such a run that has learned something; do not write to it."""
    config, folder = make_config(), tmp_path_factory.mktemp('init') / 'before'
    config.optim.lr = 0.1
    train.train(config, folder, devices=jax.devices()[:1])
    return folder


def random_npz(path, **changes):
    """A file of vision_transformer that fits the config, but for `changes` of the model."""
    size, channels = changes.pop('size', (8, 8)), changes.pop('channels', 1)
    fields = dict(num_classes=10, **MODEL) | changes
    images = jax.ShapeDtypeStruct((1, *size, channels), np.float32)
    shapes = jax.eval_shape(vit.Model(**fields).init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), shapes)
    files.write_npz(path, vision_transformer.write(params, {'name': 'vit', **fields}))
    return params


def saved(folder, step=None):
    return checkpointer.load_variables(folder / 'checkpoints', step)[1]['params']


def assert_close(a, b, but=()):
    a, b = (traverse_util.flatten_dict(tree, sep='/') for tree in (a, b))
    assert a.keys() == b.keys()
    for name in a.keys() - but:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=1e-12, err_msg=name)


HEAD = {'head/kernel', 'head/bias'}


@pytest.mark.parametrize(
    'parallel',
    [
        dict(strategy='jit', fsdp=2, min_split_size=1),
        pytest.param(dict(strategy='pmap'), marks=pytest.mark.long),
    ],
)
def test_parameters_and_their_average_start_from_the_file(config, tmp_path, capsys, parallel):
    params = random_npz(tmp_path / 'a.npz')
    config.init = {'from': str(tmp_path / 'a.npz')}
    config.parallel = parallel
    train.train(config, tmp_path / 'run', devices=jax.devices()[:2])
    with ocp.PyTreeCheckpointer() as reader:
        stored = reader.restore(
            tmp_path / 'run' / 'checkpoints' / '2' / checkpoint_format.VARIABLES
        )
    for kind in ('params', 'ema'):
        assert_close(stored[kind], params)
    assert f'from {tmp_path}/a.npz (vision_transformer npz)\n' in capsys.readouterr().out


@pytest.mark.usefixtures('one_device')
def test_a_run_is_fine_tuned_on_other_classes(trained, config, tmp_path, capsys):
    before = saved(trained)
    config.model.num_classes = None
    config.data.classes = (3, 5, 8)
    config.init = {'from': str(trained)}
    capsys.readouterr()
    train.train(config, tmp_path / 'after')
    after = saved(tmp_path / 'after')
    printed = capsys.readouterr().out
    assert says([line for line in printed.splitlines() if 'head: ' in line], '10 classes', 'by 3')
    assert f'from {trained} (run {trained}, step 2)' in printed
    assert after['head']['kernel'].shape == (16, 3)
    np.testing.assert_allclose(after['head']['kernel'], 0, atol=1e-12)
    head = {'head': before['head']}
    assert_close({**after, **head}, before)


@pytest.mark.usefixtures('one_device')
def test_classes_that_the_head_knows_are_taken(config, tmp_path, capsys):
    params = random_npz(tmp_path / 'a.npz')
    (tmp_path / 'classes.txt').write_text('8\n3\n5\n')
    config.model.num_classes = None
    config.data.classes = (3, 5, 8)
    config.init = {'from': str(tmp_path / 'a.npz'), 'classes': str(tmp_path / 'classes.txt')}
    train.train(config, tmp_path / 'run')
    params['head'] = {name: x[..., [8, 3, 5]] for name, x in params['head'].items()}
    assert_close(saved(tmp_path / 'run'), params)
    assert 'head: 3 of its 10 classes are taken\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('1\n2\n', '2 lines.* 3 classes'),
        ('1\n2\n10\n', 'class 10 '),
        ('1\n\n2\n', "line 2: ''"),
        ('1\ntwo\n2\n', "line 2: 'two'"),
        (None, 'cannot be read'),
    ],
)
def test_classes_that_cannot_be_taken_are_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / 'classes.txt').write_text(text)
    head = {'kernel': np.zeros((4, 10)), 'bias': np.zeros(10)}
    imported = TrainedModel.from_file({'head': head}, {}, None, 'a file')

    def take():
        chosen = read_classes(str(tmp_path / 'classes.txt'))
        take_classes(imported, vit.Model(num_classes=3), chosen)

    with pytest.raises(UserError, match=message):
        take()


def test_classes_are_taken_from_a_head():
    imported = TrainedModel.from_file({'norm': {'scale': np.ones(4)}}, {}, None, 'a file')
    with pytest.raises(UserError, match=r'checkpoint.*classes'):
        take_classes(imported, vit.Model(num_classes=3), np.arange(3))


@pytest.mark.usefixtures('one_device')
def test_images_of_another_size_and_scanned_blocks(config, tmp_path, capsys):
    params = random_npz(tmp_path / 'a.npz', size=(16, 16), depth=2)
    config.init = {'from': str(tmp_path / 'a.npz'), 'posemb': 'bicubic'}
    config.model.update(depth=2, scan=True)
    train.train(config, tmp_path / 'run')
    assert mentions(capsys.readouterr().out, 'pos_embed', '8 x 8', '4 x 4')
    after = saved(tmp_path / 'run')
    assert after['pos_embed'].shape == (1, 17, 16)
    np.testing.assert_allclose(
        after['encoder']['blocks']['mlp']['fc1']['kernel'][1],
        params['encoder']['block_1']['mlp']['fc1']['kernel'],
        rtol=1e-6,
    )


@pytest.mark.usefixtures('one_device')
def test_an_encoder_starts_a_model_with_other_parts(trained, config, tmp_path, capsys):
    before = saved(trained)
    config.model.update(num_classes=None, pool='map', posemb='sincos2d')
    config.data.classes = (3, 5, 8)
    config.init = {'from': str(trained), 'select': 'encoder,patch_embed'}
    capsys.readouterr()
    train.train(config, tmp_path / 'after')
    after, printed = saved(tmp_path / 'after'), capsys.readouterr().out
    assert after.keys() == {'encoder', 'patch_embed', 'map_head', 'head'}
    assert_close(after['patch_embed'], before['patch_embed'])
    assert_close(after['encoder'], before['encoder'])
    assert 'patch_embed: 2 parameters read\n' in printed
    assert 'head, map_head: not selected' in printed


@pytest.mark.usefixtures('one_device')
@pytest.mark.long
def test_a_resumed_run_ends_as_an_uninterrupted_one_and_needs_no_file(config, tmp_path, capsys):
    random_npz(tmp_path / 'a.npz')
    config.init = {'from': str(tmp_path / 'a.npz'), 'posemb': 'bilinear'}
    config.optim.lr = 0.1
    config.evals = dict(test=dict(split='test[:32]', **DATA))
    config.every.eval = 2
    expected = train.train(config, tmp_path / 'whole')
    with pytest.raises(train.Preempted):
        train.train(config, tmp_path / 'parts', stop_at=1)
    (tmp_path / 'a.npz').unlink()
    capsys.readouterr()
    assert train.train(config, tmp_path / 'parts') == expected
    assert 'a.npz' not in capsys.readouterr().out
    whole, parts = (saved(tmp_path / name) for name in ('whole', 'parts'))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert train.train(config, tmp_path / 'parts') == expected
    stored = json.loads((tmp_path / 'parts' / 'config.json').read_text())
    assert stored['init'] == {'from': str(tmp_path / 'a.npz'), 'posemb': 'bilinear'}
    del config.init
    with pytest.raises(UserError, match=r'config\.init differs'):
        train.train(config, tmp_path / 'parts')


def test_the_flag_needs_no_section(repo, tmp_path):
    spec = f'{repo}/experiments/vit/digits.py:smoke'
    config = load.load(spec, ['init.from=a.npz'])
    assert config.init.to_dict() == {'from': 'a.npz'}
    config = load.load(spec, ['init.select=a->b', 'init.from=gs://b/a.npz:img'])
    assert config.init.to_dict() == {'from': 'gs://b/a.npz:img', 'select': 'a->b'}
    assert 'init' not in load.load(spec)
    for override, message in [
        ('init.form=a.npz', "did you mean 'from'"),
        ('init=a.npz', 'keys.*posemb'),
        ('init.posemb=nearest', 'method.*nearest.*antialiased.*bilinear'),
        ('init.classes=a.txt', r'classes=a\.txt: .*--config\.init\.from=FILE'),
    ]:
        with pytest.raises(UserError, match=message):
            load.load(spec, [override])


MISTAKES = {
    'no file': (None, 'no.npz'),
    'no such part': ({}, "no parameters below 'encodr'; did you mean 'encoder'?"),
    'another width': (
        dict(width=32),
        r'cls_token has shape (1, 1, 32) instead of (1, 1, 16)',
    ),
    'another depth': (dict(depth=2), 'the checkpoint has depth=2; config.model has depth=1'),
    'color': (
        dict(channels=3),
        'patch_embed/kernel has shape (2, 2, 3, 16) instead of (2, 2, 1, 16)',
    ),
}


@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize('mistake', MISTAKES)
def test_mistakes_are_one_line_and_write_nothing(repo, tmp_path, capsys, mistake):
    changes, message = MISTAKES[mistake]
    path = tmp_path / ('no.npz' if changes is None else 'a.npz')
    if changes is not None:
        random_npz(path, **changes)
    words = [f'--config.model.{k}={v}' for k, v in MODEL.items()]
    config = f'{repo}/experiments/vit/digits.py:smoke'
    folder = tmp_path / 'run'
    argv = ['train', '--config', config, *words, f'--config.init.from={path}']
    if mistake == 'no such part':
        argv.append('--config.init.select=encodr')
    assert main([*argv, '--workdir', str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('error: ')
    assert captured.err.count('\n') == 1
    assert message in captured.err
    assert str(path) in captured.err
    assert not folder.exists()


def test_another_gelu_is_another_model(config, tmp_path):
    random_npz(tmp_path / 'a.npz')
    config.init = {'from': str(tmp_path / 'a.npz')}
    config.model.gelu = 'erf'
    with pytest.raises(UserError, match=r"set config\.model\.block\.gelu='tanh'"):
        train.train(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('spec', ['vit/finetune.py:cifar10,mu/32', 'bit/finetune.py:pets'])
def test_fine_tuning_asks_for_the_checkpoint(repo, tmp_path, capsys, spec):
    config = f'{repo}/experiments/{spec}'
    names = [f'evals.{name}' for name in load.load(config).evals]
    sources = [f'--config.{name}.source=digits' for name in ('data', *names)]
    words = ['train', '--config', config, '--workdir', str(tmp_path / 'run'), *sources]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert mentions(captured.err, 'config.init.from')
    assert captured.err.count('\n') == 1
    assert not (tmp_path / 'run').exists()
    assert load.load(config, ['init.from=']).init['from'] == ''
