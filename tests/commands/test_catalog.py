"""What is listed is what a config may name, with a line of its own."""

import pathlib

import pytest
from helpers.experiments import ROOT
from helpers.sections import schedule

from vit_jax.commands import _catalog
from vit_jax.data.transforms import registry
from vit_jax.errors import UserError, resolve
from vit_jax.optim import make


@pytest.mark.parametrize(
    ('room', 'attribute'),
    [
        ('models', 'Model'),
        ('tasks', 'Task'),
        ('evaluators', 'Evaluator'),
        ('data.sources', 'Source'),
    ],
)
def test_every_module_that_is_listed_can_be_named(room, attribute):
    package = f'vit_jax.{room}'
    found = _catalog.list_modules(package)
    assert found and all(one.line for one in found)
    for one in found:
        assert resolve(package, one.name, attribute)


def test_every_function_that_is_listed_can_be_named():
    for one in _catalog.transforms():
        assert registry.find(one.name) and one.line and one.arguments.startswith('(')
    for one in _catalog.optimizers():
        assert make.factory(one.name) and one.line
    for one in _catalog.schedules():
        assert schedule(0.1, 10, name=one.name, boundaries=(5,)) and one.line


def test_arguments_that_no_text_can_give_are_left_out():
    (tokenize,) = (one for one in _catalog.transforms() if one.name == 'tokenize')
    assert tokenize.arguments == '(field=None, length=None, max_len=None, pad=0)'


def test_experiments_are_those_of_the_folder_with_their_arguments(tmp_path: pathlib.Path):
    config = "'''First line.\n\nMore.'''\ndef get_config(size='S', fast=False): pass\n"
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'foo.py').write_text(config)
    (tmp_path / 'sweep.py').write_text('def get_sweep(arg): pass')
    found, sweep = _catalog.experiments(tmp_path)
    assert (found.functions, sweep.functions) == (('get_config',), ('get_sweep',))
    assert (found.name, found.line) == (str(tmp_path / 'sub' / 'foo.py'), 'First line.')
    assert (found.arguments, sweep.arguments) == ('size=S fast=False', '...')


def test_experiments_of_the_package_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {named.name: named for named in _catalog.experiments()}
    assert found['vit/digits'].arguments.endswith(' smoke')
    assert found.keys() == {
        str(path.relative_to(ROOT / 'experiments').with_suffix(''))
        for path in ROOT.glob('experiments/*/*.py')
    }


def test_a_folder_without_experiments_is_told(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="none'"):
        _catalog.experiments(tmp_path / 'none')
