"""`inspect`: parameters and FLOPs of a config, a run and a checkpoint."""

import json

import pytest
from helpers.messages import mentions

from vit_jax import __main__ as cli
from vit_jax.commands import inspect

CONFIG = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config(arg=None):
    config = ConfigDict(dict(seed=0, total='10 steps', batch_size=8))
    config.model = dict(name='vit', **vit.variant(arg or 'B/16'))
    config.model.num_classes = placeholder(int)
    config.task = dict(name='classify')
    config.data = dict(source='folder:/nowhere', split='train', transforms='')
    config.evals = {}
    config.optim = dict(name='sgd', lr=0.1)
    config.step = {}
    config.every = dict(log='1', eval='1', checkpoint='1')
    config.checkpoint = {}
    config.parallel = {}
    return config
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG)
    return path


def run(capsys, *argv):
    assert cli.main(['inspect', *map(str, argv), '--json']) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_config(config, capsys):
    result = run(capsys, '--config', config, '--image-size', 224)
    assert result['total'] == 86_567_656
    assert sum(row['count'] for row in result['parameters']) == result['total']
    assert result['flops']['forward'] == pytest.approx(2 * 17.564e9, rel=1e-4)
    assert result['flops']['train'] == 3 * result['flops']['forward']
    assert result['inputs'] == [[224, 224, 3]]
    by_path = {row['path']: row for row in result['parameters']}
    assert by_path['patch_embed/kernel']['shape'] == [16, 16, 3, 768]
    assert by_path['head/bias'] == {
        'path': 'head/bias',
        'shape': [1000],
        'dtype': 'float32',
        'count': 1000,
    }


@pytest.mark.slow
def test_adapters_are_listed_and_what_they_train(config, capsys):
    argv = ['--config', f'{config}:mu/16', '--image-size', '32', '--config.init.from=x.npz']
    before, after = (run(capsys, *argv, *more) for more in ([], ['--config.lora.rank=4']))
    paths = {row['path']: row['shape'] for row in after['parameters']}
    assert paths['encoder/block_0/attention/qkv/lora/value/b'] == [4, 2, 16]
    count = 2 * 4 * (32 + 32)  # of queries and values
    assert after['total'] == before['total'] + count
    assert after['remarks'] == [
        f'LoRA of rank 4: {count + 33 * 1000:,} parameters are trained and saved'
    ]
    assert after['flops'] == before['flops']


def test_blocks_are_listed_in_their_order(config, capsys):
    argv = ['--config', f'{config}:Ti/16', '--image-size', 32, '--channels', 1]
    paths = [row['path'] for row in run(capsys, *argv)['parameters']]
    biases = [p for p in paths if p.endswith('mlp/fc1/bias')]
    assert biases == [f'encoder/block_{i}/mlp/fc1/bias' for i in range(12)]


@pytest.mark.slow
def test_a_run_and_its_checkpoints(smoke_run, repo, capsys):
    from_config = run(capsys, '--config', f'{repo}/experiments/vit/digits.py:smoke')
    assert from_config['total'] == 17_418
    for argv in (
        ['--workdir', smoke_run],
        ['--checkpoint', smoke_run / 'checkpoints'],
        ['--checkpoint', smoke_run / 'checkpoints' / '10'],
    ):
        assert run(capsys, *argv) == from_config


def test_the_table(smoke_run, capsys):
    assert cli.main(['inspect', '--workdir', str(smoke_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ['parameter', 'shape', 'dtype', 'count']
    (kernel,) = [line for line in lines if line.startswith('head/kernel')]
    assert kernel.split() == ['head/kernel', '32', 'x', '10', 'float32', '320']
    assert 'vit: 17,418 parameters' in lines
    assert 'one example of [8, 8, 1]: 0.0005618 GFLOP forward' in lines[-1]


def test_a_checkpoint_without_its_data_still_has_parameters(smoke_run, monkeypatch, capsys):
    def gone(*args, **keywords):
        raise inspect.UserError('no such data')

    monkeypatch.setattr('vit_jax.data.census.open_source', gone)
    result = run(capsys, '--workdir', smoke_run)
    assert result['total'] == 17_418
    assert 'flops' not in result
    assert 'no such data' in result['note']
    assert run(capsys, '--workdir', smoke_run, '--image-size', 8, '--channels', 1)['flops']


def test_mistakes_are_one_line(config, smoke_run, tmp_path, capsys):
    for argv, message in [
        ([], 'inspect'),
        (['--workdir', smoke_run, '--config', config], 'inspect'),
        (['--config', config], '--image-size'),
        (['--config', config, '--image-size', '-1'], 'at least 1'),
        (['--config', config, '--image-size', '30'], 'patch_size 16'),
        (['--workdir', tmp_path], 'holds no run'),
        (['--checkpoint', tmp_path], 'neither model.safetensors'),
        (['--checkpoint', smoke_run / 'checkpoints' / '7'], '7'),
    ]:
        assert cli.main(['inspect', *map(str, argv)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1
        assert mentions(captured.err, message)


def test_natural_order():
    paths = ['b/block_10/x', 'b/block_2/x', 'b/norm', 'a1', 'b/block_2/a']
    assert sorted(paths, key=inspect.natural_order) == [
        'a1',
        'b/block_2/a',
        'b/block_2/x',
        'b/block_10/x',
        'b/norm',
    ]


def test_alike_blocks_are_one_line_unless_unfolded(config, capsys):
    argv = ['inspect', '--config', f'{config}:mu/16', '--config.model.depth=3']
    argv += ['--image-size', '32']
    assert cli.main(argv) == 0
    folded = capsys.readouterr().out
    assert cli.main([*argv, '--unfold']) == 0
    unfolded = capsys.readouterr().out
    assert 'block_{0..2}/mlp/fc1/bias' in folded and 'x3' in folded and 'block_1' not in folded
    assert 'block_1/mlp/fc1/bias' in unfolded and '..' not in unfolded
