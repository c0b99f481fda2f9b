"""`soup`: averages of models, and the line between two."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.inference import load, soup
from vit_jax.interop import checkpoint

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture(scope='module')
def run(repo):
    return repo / 'tests' / 'golden' / 'run_digits'


@pytest.fixture
def ends(run):
    """A trained model, and one of the same form whose parameters are random."""
    first, rng = load.read(run), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), first.params)
    return first, dataclasses.replace(first, params=params)


@pytest.fixture
def files(ends, tmp_path):
    names = [str(tmp_path / f'{name}.npz') for name in 'ab']
    for model, name in zip(ends, names, strict=True):
        checkpoint.write(model, name)
    return names


def call(*words) -> int:
    return cli.main(['soup', *map(str, words)])


def test_files_are_averaged_with_their_weights(files, tmp_path):
    """Every array of the file is the mean of theirs."""
    out = tmp_path / 'out.npz'
    assert call(*files, '--weights', '.25,.75', '--out', out) == 0
    first, second, mixed = (dict(np.load(name)) for name in (*files, out))
    assert mixed.keys() == first.keys()
    for name, values in mixed.items():
        expected = 0.25 * first[name] + 0.75 * second[name]
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert call(*files, '--out', out) == 2  # it is there already


def test_of_a_student_the_encoder_is_written(repo, tmp_path):
    """As by `convert`, as no code base has its projector."""
    student, names = (
        repo / 'tests' / 'golden' / 'run_lejepa',
        [tmp_path / 'a.npz', tmp_path / 'b.npz'],
    )
    assert call(student, student, '--out', names[0]) == 0
    assert cli.main(['convert', str(student), str(names[1])]) == 0
    mixed, one = (dict(np.load(name)) for name in names)
    assert mixed.keys() == one.keys()
    for name, values in mixed.items():
        np.testing.assert_allclose(values, one[name], rtol=1e-6, err_msg=name)


def test_equal_weights_and_more_than_two(ends):
    first, second = ends
    mixed = soup.mix([first, second, first])
    for path, values in jax.tree.leaves_with_path(mixed.params):
        a, b = (dict(jax.tree.leaves_with_path(m.params))[path] for m in ends)
        np.testing.assert_allclose(values, (2 * a + b) / 3, rtol=1e-5, atol=1e-6)
    assert soup.mix(ends, (1.0, 0.0)).params.keys() == first.params.keys()


@pytest.mark.slow
def test_the_ends_of_the_line_are_the_models(run, ends, monkeypatch, capsys):
    first, second = (load.open_model(run, stored=model) for model in ends)
    opened, expected = {'a': first, 'b': second}, vit_jax.evaluate(run)['test/loss']
    monkeypatch.setattr(load, 'open_model', lambda path, **_: opened[path])
    assert call('a', 'b', '--line', '2', '--json') == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row['weight'] for row in rows] == [0, 0.5, 1]
    assert call('b', 'a', '--line', '1', '--json') == 0
    back = json.loads(capsys.readouterr().out)
    for key, value in rows[0].items():
        if key != 'weight':
            assert (back[1][key], back[0][key]) == (value, rows[2][key])
    losses = [row['test/loss'] for row in rows]
    assert losses[0] == expected and len(set(losses)) == 3
    assert call('a', 'b', '--line', '2') == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_what_cannot_be_averaged_is_refused(ends, files, run, tmp_path, capsys):
    first, second = ends
    head = dict(second.params['head'], bias=np.zeros(3, np.float32))
    with pytest.raises(UserError, match='head/bias'):
        soup.mix([first, dataclasses.replace(second, params={**second.params, 'head': head})])
    swapped = dataclasses.replace(second, class_names=tuple('9876543210'))
    with pytest.raises(UserError, match='classes'):
        soup.mix([dataclasses.replace(first, class_names=tuple('0123456789')), swapped])
    out = ('--out', tmp_path / 'out.npz')
    for words in (
        (*files, '--weights', '.5', *out),
        (*files, '--weights', '.5,.6', *out),
        (*files, '--weights', 'nan,.5', *out),
        (*files, '--weights', 'a,b', *out),
        (files[0], *out),
        files,
        (*files, '--line', '2', *out),
        (run, run.parent / 'run_mixer', *out),
    ):
        assert call(*words) == 2, words
        assert len(capsys.readouterr().err.splitlines()) == 1, words
    assert not out[1].exists()
