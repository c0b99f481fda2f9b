"""`benchmark`: a table and JSON of a config's steps."""

import json
import re

import jax
import pytest
from helpers.messages import mentions

from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.optim import lora
from vit_jax.profiling import benchmark
from vit_jax.profiling.batch_spec import row_of


@pytest.fixture
def digits(repo):
    return f'{repo}/experiments/vit/digits.py:smoke'


@pytest.fixture
def linear(repo):
    return f'{repo}/tests/helpers/linear.py'


@pytest.mark.slow
def test_table_and_json(linear, tmp_path, capsys):
    out = tmp_path / 'out.json'
    scheduled = [f'--config.optim.{key}.warmup=9 steps' for key in ('schedule', 'decay_schedule')]
    flags = ['--steps', '3', '--json', str(out), *scheduled]
    assert cli.main(['benchmark', '--config', linear, *flags]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == 'helpers.linear, image [8, 8, 1], batch 32, 8 x cpu (jit)'
    assert [line.split()[0] for line in lines[1:]] == ['step', 'forward', 'train']
    record = json.loads(out.read_text())
    assert record['example'] == {'image': [[8, 8, 1], 'uint8'], 'label': [[], 'int32']}
    assert record['config']['model']['num_classes'] == 10
    assert record['versions']['jax'] == jax.__version__
    assert (record['device_kind'], record['num_devices']) == ('cpu', 8)
    for name, factor in (('forward', 1), ('train', 3)):
        timing = record[name]
        assert timing['images_per_sec'] * timing['step_sec'] == pytest.approx(32)
        per_image = timing['flops_per_sec'] * timing['step_sec'] / 32
        assert per_image == pytest.approx(factor * 2 * 64 * 10, rel=1e-3)


@pytest.mark.slow
def test_text_is_measured_in_tokens(repo, tmp_path, capsys):
    out = tmp_path / 'out.json'
    config = f'{repo}/experiments/translate/synthetic.py:smoke'
    flags = ['--forward-only', '--steps', '2', '--json', str(out)]
    flags += ['--config.batch_size=512', '--config.model.depth=1']
    assert cli.main(['benchmark', '--config', config, *flags]) == 0
    title, heading, row = capsys.readouterr().out.splitlines()
    assert title.startswith('seq2seq, source [13], target [13], batch 32, ')
    assert heading.split()[:7] == ['step', 'compile', 's', 'step', 'ms', 'p10-p90', 'tokens/s']
    pairs = json.loads(out.read_text())['forward']['images_per_sec']
    assert float(row.split()[4].replace(',', '')) == pytest.approx(13 * pairs, abs=0.5)


@pytest.mark.slow
def test_forward_only_without_data(linear, tmp_path, capsys):
    out = tmp_path / 'out.json'
    flags = ['--forward-only', '--steps', '2', '--image-size', '16', '--json', str(out)]
    overrides = ['--config.data.source=folder:/nowhere', '--config.batch_size=16']
    assert cli.main(['benchmark', '--config', linear, *flags, *overrides]) == 0
    assert 'image [16, 16, 3], batch 16' in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert 'train' not in record
    assert record['config']['model']['num_classes'] == 1000


@pytest.mark.slow
def test_train_only(linear, tmp_path, capsys):
    out = tmp_path / 'out.json'
    command = ['benchmark', '--config', linear, '--train-only', '--steps', '2']
    assert cli.main([*command, '--config.batch_size=16', '--json', str(out)]) == 0
    record = json.loads(out.read_text())
    assert 'forward' not in record and record['train']['batch_size'] == 16
    capsys.readouterr()
    assert cli.main([*command, '--forward-only']) == 2
    assert 'not allowed with' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_adapters_are_timed(digits, capsys, monkeypatch):
    calls, make = [], benchmark.make_train_step

    def spy(model, task, optimizer, *args):
        calls.append((model, optimizer.freeze))
        return make(model, task, optimizer, *args)

    monkeypatch.setattr(benchmark, 'make_train_step', spy)
    overrides = [
        f'--config.{text}' for text in ('init.from=x.npz', 'lora.rank=2', 'step.ema_decay=0')
    ]
    assert cli.main(['benchmark', '--config', digits, '--steps', '1', *overrides]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
        'forward',
        'train',
    ]
    (model, (pattern,)) = calls[0]
    assert isinstance(model, lora.Adapted)
    assert re.search(pattern, 'encoder/block_0/mlp/fc1/kernel')
    assert not re.search(pattern, 'encoder/block_0/attention/qkv/lora/query/a')


def test_the_data_give_the_sizes_unless_flags_do(digits):
    config = load.load(digits)
    complete, spec, _ = row_of(config)
    assert spec['image'].shape == (8, 8, 1)
    assert complete.model.num_classes == 10
    assert config.model.num_classes is None
    config.model.num_classes = 7
    complete, spec, _ = row_of(config, channels=1)
    assert spec['image'].shape == (224, 224, 1)
    assert complete.model.num_classes == 7


def test_mistakes_are_one_line(digits, capsys, tmp_path):
    text = digits.replace('vit/digits.py', 'translate/synthetic.py')
    for argv, message in [
        ([], ('benchmark', 'config')),
        (['--config', text, '--config.batch_size=100'], '8 rows of 13 are 104'),
        (['--config', text, '--config.data.source=text:/no'], ('/no', 'No such file')),
        (['--config', digits, '--steps', '0'], ('--steps', '1', '0')),
        (['--config', digits, '--config.batch_size=12'], 'multiple of 8'),
        (['--config', digits, '--config.data.source=folder:/nowhere'], 'or give --image-size'),
        (['--config', digits, '--image-size', '7'], 'patch_size'),
    ]:
        assert cli.main(['benchmark', *argv]) == 2
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1
        assert mentions(captured.err, message)
