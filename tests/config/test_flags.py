"""A flag sets one value of the config, in the type that it has."""

import pathlib
import re

import pytest
from helpers.messages import mentions

from vit_jax.commands import train
from vit_jax.commands._parser import Parser
from vit_jax.config import load, words
from vit_jax.errors import UserError

DIGITS = 'experiments/vit/digits.py'


@pytest.fixture(autouse=True)
def in_repo(repo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)


@pytest.mark.parametrize(
    ('override', 'path', 'value'),
    [
        ('batch_size=16', 'batch_size', 16),
        ('batch_size=1e3', 'batch_size', 1000),
        ('optim.lr=1', 'optim.lr', 1.0),
        ('total=7 epochs', 'total', '7 epochs'),
        ('model.num_classes=12', 'model.num_classes', 12),
        ('model.width=64', 'model.width', 64),
        ('task.value_range=(0.0, 1.0)', 'task.value_range', (0.0, 1.0)),
        ('data.cache=False', 'data.cache', False),
        ('evals.test.split=train[:10]', 'evals.test.split', 'train[:10]'),
        # Not in the file: the default of the constructor is what the flag replaces.
        ('model.dropout=0.25', 'model.dropout', 0.25),
        ('model.representation_size=8', 'model.head.representation_size', 8),
        ('model.head.representation_size=8', 'model.head.representation_size', 8),
        ('model.pool=map', 'model.pool.kind', 'map'),
        ('model.positions=rope(theta=9)', 'model.positions.rope.theta', 9.0),
        ('model.positions.kind=rope', 'model.positions.kind', 'rope'),
        ('model.mlp=swiglu(norm=True)', 'model.block.mlp_norm', True),
        ('model.no_bias=key|mlp', 'model.no_bias', ('key', 'mlp')),
        ('model.no_bias=("key",)', 'model.no_bias', ('key',)),
        ('model.scan=true', 'model.scan', True),
        ('optim.layer_decay=0.75', 'optim.layer_decay', 0.75),
        ('optim.freeze=("pos",)', 'optim.freeze', ('pos',)),
        ('optim.lr=3e-4', 'optim.lr', 3e-4),
        ('optim.mu_dtype=bfloat16', 'optim.mu_dtype', 'bfloat16'),
        ('optim.clip_norm=None', 'optim.clip_norm', None),
        ('model.representation_size=None', 'model.head.representation_size', None),
        ('parallel.min_split_size=1', 'parallel.min_split_size', 1),
        ('checkpoint.keep_every=5', 'checkpoint.keep_every', '5'),
        ('every.eval=5', 'every.eval', '5'),
        ('evals.test.every=3 epochs', 'evals.test.every', '3 epochs'),
        ('evals.test.classes=[1, 2]', 'evals.test.classes', (1, 2)),
        ('data.threads=2', 'data.threads', 2),
        ('init.from=a.npz', 'init.from', 'a.npz'),
        ('branch.step=7', 'branch.step', 7),
        ('optim.schedule.cooldown=5%', 'optim.schedule.cooldown', '5%'),
    ],
)
def test_override(override: str, path: str, value: object) -> None:
    node = load.load(DIGITS, [override])
    for key in path.split('.'):
        node = node[key]
    assert node == value
    assert type(node) is type(value)


def test_overrides_are_found_among_other_words() -> None:
    argv = ['--config.a=1', '--workdir', 'x', '--config', 'f.py', '--config.b', '2']
    assert load.split_overrides(argv) == (
        ['a=1', 'b=2'],
        ['--workdir', 'x', '--config', 'f.py'],
    )


def test_keys_of_the_optimizer_that_the_file_names() -> None:
    overrides = ['optim.clipping_threshold=None', 'optim.decay_rate=0.9']
    config = load.load(f'{DIGITS}:adafactor', overrides)
    assert config.optim.clipping_threshold is None
    assert config.optim.decay_rate == 0.9


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('optim.lr=None', 'expected float'),
        ('optim.clip_norm=much', ('float', 'None')),
        ('optim.clipping_threshold=1.0', ('config.optim', "'clipping_threshold'")),
        ('optim.schedule=cosine', ('group', 'warmup')),
        ('init=a.npz', 'is a group'),
        ('step.axis_name=data', ('config.step', "'axis_name'")),
        ('data.seed=3', ('config.data', "'seed'")),
        ('image_size=32', '--config.data.transforms='),
        ('optim.learning_rate=1', '--config.optim.lr='),
        ('mixup=False', '--config.task.mixup='),
        ('task.mixup=False', 'expected float; 0 is off'),
        ('evals.tset.split=test', "did you mean 'test'"),
        ('task.value_range=1', 'expected tuple'),
        ('checkpoint.keep_every=often', 'write '),
    ],
)
def test_mistakes_are_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load.load(DIGITS, [override])
    assert mentions(str(error.value), message)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('setting', words.SETTINGS, ids=lambda setting: setting.names.split()[0])
def test_words_of_other_trainers_name_keys(setting: words.Setting) -> None:
    hint = words.find_hint(setting.names.split()[0])
    given = re.findall(r"--config\.([\w.]+=(?:'[^']*'|[^ ,]*))", hint)
    load.load(f'{DIGITS}:sgd', [override.replace("'", '') for override in given])
    assert given or setting.names.startswith(('output ', 'resume ', 'device '))
    assert not setting.example or re.fullmatch(setting.pattern, setting.example)


@pytest.mark.parametrize(
    ('flag', 'value', 'hint'),
    [
        ('--learning-rate', '1e-3', '--config.optim.lr=1e-3'),
        ('--epochs', '90', "--config.total='90 epochs'"),
        ('--warmup-epochs', '5', "--config.optim.schedule.warmup='5 epochs'"),
        ('--data-path', '/my data', "--config.data.source=folder:'/my data'"),
        ('--output-dir', 'out', '--workdir out'),
        ('--opt', 'lion', '--config.optim.name=lion'),
        ('--arch', 'vit_base_patch16_224', '--config.model.name=vit'),
        ('--device', 'cuda', 'JAX_PLATFORMS=cuda'),
        ('--device', 'cuda:0', 'JAX_PLATFORMS=cpu'),
        ('--neither', '1', ''),
    ],
)
def test_hints_repeat_the_users_value(flag: str, value: str, hint: str) -> None:
    assert words.find_hint(flag, value).endswith(hint)
    assert bool(words.find_hint(flag, value)) == bool(hint)


def test_another_optimizer_drops_the_options_that_it_does_not_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ['--config.optim.momentum=0.5', '--config.optim.name=sgd']
    _, config = train.parse([DIGITS, '--workdir', 'runs/none', *flags])
    assert config.optim.momentum == 0.5
    recipe = load.load(DIGITS)
    assert (dropped := {*recipe.optim} - {*config.optim})
    note = capsys.readouterr().err
    assert f'{DIGITS}:optimizer=sgd' in note and all(f'{key}=' in note for key in dropped)
    with pytest.raises(UserError, match=r"config\.optim 'b2'"):
        load.load(DIGITS, ['optim.b2=0.9', 'optim.name=sgd'])


@pytest.mark.parametrize(
    ('flag', 'hint'),
    [('--lr', '--config.optim.lr='), ('--epochs', '--config.total='), ('--batch-size', '=3')],
)
def test_flags_of_other_trainers_name_keys(flag: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        train.parse(['--config', DIGITS, '--workdir', 'runs/none', flag, '3'])
    with pytest.raises(UserError) as error:
        Parser('goodput', None).parse_args([flag])  # which reads no config
    assert hint not in str(error.value)


def test_a_flag_may_set_what_has_another_type_in_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'config.py').write_text(
        'from experiments.vit import digits\n'
        'def get_config(optimizer="adamw"):\n'
        '    config = digits.get_config(optimizer)\n'
        '    changed = dict(total=100, optim=dict(name="adam", lr=1))\n'
        '    return type(config)(config.to_dict() | changed)\n'
    )
    config = load.load(f'{tmp_path}/config.py', ['optim.lr=3e-4', 'total=2 epochs'])
    assert (config.optim.lr, config.total) == (3e-4, '2 epochs')
