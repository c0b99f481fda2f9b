"""Catalog: every listed name can be used in a config, and has a description."""

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
    entries = _catalog.list_modules(package)
    assert entries and all(entry.line for entry in entries)
    for entry in entries:
        assert resolve(package, entry.name, attribute)


def test_every_function_that_is_listed_can_be_named():
    for entry in _catalog.transforms():
        assert registry.find_function(entry.name) and entry.line and entry.arguments.startswith('(')
    for entry in _catalog.optimizers():
        assert make.factory(entry.name) and entry.line
    for entry in _catalog.schedules():
        assert schedule(0.1, 10, name=entry.name, boundaries=(5,)) and entry.line


def test_arguments_that_no_text_can_give_are_left_out():
    (tokenize,) = (entry for entry in _catalog.transforms() if entry.name == 'tokenize')
    assert tokenize.arguments == '(field=None, length=None, max_len=None, pad=0, end=True)'


def test_experiments_of_a_folder_have_arguments(tmp_path: pathlib.Path):
    config = "'''First line.\n\nMore.'''\ndef get_config(size='S', fast=False): pass\n"
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'foo.py').write_text(config)
    (tmp_path / 'sweep.py').write_text('def get_sweep(arg): pass')
    experiment, sweep = _catalog.experiments(tmp_path)
    assert (experiment.functions, sweep.functions) == (('get_config',), ('get_sweep',))
    assert (experiment.name, experiment.line) == (str(tmp_path / 'sub' / 'foo.py'), 'First line.')
    assert (experiment.arguments, sweep.arguments) == ('size=S fast=False', '...')


def test_experiments_of_the_package_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiments = {experiment.name: experiment for experiment in _catalog.experiments()}
    assert experiments['vit/digits'].arguments.endswith(' smoke')
    assert experiments.keys() == {
        str(path.relative_to(ROOT / 'experiments').with_suffix(''))
        for path in ROOT.glob('experiments/*/*.py')
    }


def test_a_missing_folder_is_one_line(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="none'"):
        _catalog.experiments(tmp_path / 'none')
