"""Names of folders that some layer takes for something else: held, or refused in one line."""

import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax.__main__ import main
from vit_jax.checkpoints import format
from vit_jax.checkpoints.checkpointer import Checkpointer, load_variables, restore_step
from vit_jax.errors import EXIT_PREEMPTED, UserError

pytestmark = pytest.mark.usefixtures('one_device')

NAMES = [
    'lr[1]',
    '[!a]',
    'a*b',
    '**',
    'a?b',
    '{a,b}',
    'a b',
    '#a',
    'a%20b',
    '~',
    'a~',
    'a\nb',
    'a:b',
    's3:',
    '$HOME',
    "a'b",
    'é中',
    'x' * 200,
]
# Of patterns, of what is escaped, of places elsewhere, and a long one.
FEW = ('[!a]', '**', '{a,b}', 'a%20b', '~', 'a\nb', 's3:', '$HOME', 'x' * 200)
LINEAR = 'tests/helpers/linear.py'
ARRAYS = {'kernel': jnp.arange(6.0).reshape(2, 3), 'bias': jnp.ones(3, jnp.bfloat16)}


def train(repo: pathlib.Path, folder: object, *flags: str) -> int:
    return main(['train', '--config', f'{repo}/{LINEAR}', '--workdir', str(folder), *flags])


def save(folder: pathlib.Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {'params': ARRAYS}, {'told': 1})


def restored(folder: pathlib.Path) -> dict:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), ARRAYS)
    return restore_step(folder, 1, {'params': target})[1]


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.long] * (name not in FEW)) for name in NAMES]
)
def test_what_is_saved_under_any_name_is_read(tmp_path, name):
    save(folder := tmp_path / name / 'checkpoints')
    found = [load_variables(folder)[1]['params'], restored(folder)['params']]
    for params, (key, array) in itertools.product(found, ARRAYS.items()):
        np.testing.assert_array_equal(params[key], array)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
@pytest.mark.fault(62)
def test_a_run_below_all_of_these_names_is_evaluated(repo, tmp_path, capsys):
    folder = tmp_path.joinpath(*NAMES)
    assert train(repo, folder, '--stop-at=1') == EXIT_PREEMPTED
    assert main(['evaluate', '--allow', 'helpers', '--workdir', str(folder)]) == 0
    assert 'test/accuracy' in capsys.readouterr().out


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('a\\b', ('stored', "'a")),
        ('gs:', ('stored', "'gs:'")),
        ('/gs/runs', ('stored', "'gs'")),
        ('~nobody-of-that-name/runs', ('home', '~nobody-of-that-name')),
        ('\udcc3\udca9', 'set PYTHONUTF8=1'),
        ('caf\udce9', 'is not UTF-8, but perhaps Latin-1'),
    ],
)
def test_names_that_would_be_taken_for_others_are_refused(
    repo, tmp_path, capsys, monkeypatch, name, words
):
    monkeypatch.chdir(tmp_path)
    assert train(repo, name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.fault(62)
def test_a_name_that_python_does_not_read_as_utf8_is_one_line(tmp_path):
    ascii_only = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    words = [sys.executable, '-m', 'vit_jax', 'evaluate', '--workdir', str(tmp_path / 'é')]
    done = subprocess.run(
        words, env={**os.environ, **ascii_only}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says(line, 'UTF-8: set PYTHONUTF8=1', 'UTF-8 locale')


@pytest.mark.fault(62)
def test_arrays_that_cannot_be_opened_are_not_certified(tmp_path, monkeypatch):
    """As Orbax alone leaves them, which takes `[1]` for a pattern."""
    monkeypatch.setattr(format, 'orbax_path', lambda directory: directory)
    folder = tmp_path / 'lr[1]' / 'checkpoints'
    with pytest.raises(UserError, match=r'1 .*params/kernel'):
        save(folder)
    assert not list(folder.iterdir())
