"""A flag sets one value of the config, in the type that it has."""

import pathlib

import pytest

from vit_jax.config import flags
from vit_jax.config import load as config_lib

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
        ('model.representation_size=8', 'model.representation_size', 8),
        ('model.scan=true', 'model.scan', True),
        ('optim.layer_decay=0.75', 'optim.layer_decay', 0.75),
        ('optim.freeze=("pos",)', 'optim.freeze', ('pos',)),
        ('optim.schedule.cooldown=5%', 'optim.schedule.cooldown', '5%'),
    ],
)
def test_override(override: str, path: str, value: object) -> None:
    node = config_lib.load(DIGITS, [override])
    for key in path.split('.'):
        node = node[key]
    assert node == value
    assert type(node) is type(value)


def test_overrides_are_found_among_other_words() -> None:
    argv = ['--config.a=1', '--workdir', 'x', '--config', 'f.py', '--config.b', '2']
    assert flags.split(argv) == (
        ['a=1', 'b=2'],
        ['--workdir', 'x', '--config', 'f.py'],
    )
