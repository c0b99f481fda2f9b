"""Every key is described where it is defined, and the page of all keys is current."""

import importlib.util
import pathlib

import pytest

from vit_jax import __main__ as cli
from vit_jax.config import load, reference

PACKAGE = reference.package_keys()


@pytest.mark.parametrize('section', PACKAGE)
def test_every_key_has_a_line(section: str):
    assert [key.name for key in PACKAGE[section] if not key.line] == []


def test_the_pages_are_current(repo: pathlib.Path):
    path = repo / 'docs' / 'site' / 'keys.py'
    spec = importlib.util.spec_from_file_location('keys', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = module.lay_out(PACKAGE)
    assert {path: path.read_text() for path in pages} == pages, 'run `make docs`'
    assert {*(repo / 'docs' / 'config').iterdir()} == pages.keys() - {repo / 'docs' / 'config.md'}


def test_values_of_a_config_stand_beside_defaults(repo: pathlib.Path):
    config = load.load(f'{repo}/experiments/vit/digits.py', ['optim.lr=0.5'])
    found = {
        f'{section}.{key.name}': key
        for section, keys in reference.config_keys(config).items()
        for key in keys
    }
    assert (found['config.optim.lr'].value, found['config.optim.lr'].default) == ('0.5', '')
    assert found['config.init.from'].value == found['config.init.from'].default == "''"
    assert found['config.total'].type == 'duration'
    assert found['config.optim.b2'].line.startswith('Exponential decay rate')
    assert {'config.seed', 'config.optim.schedule.warmup', 'config.evals.test.every'} <= set(found)
    assert 'config.model' not in found  # its keys stand in its section


def test_help_config_prints_them_and_trains_nothing(repo: pathlib.Path, capsys):
    config = f'{repo}/experiments/vit/digits.py'
    assert cli.main(['train', '--config', config, '--help-config', '--config.seed=7']) == 0
    out = capsys.readouterr().out
    assert 'config.optim.schedule' in out and 'random seed' in out and ' 7 ' in out
    assert cli.main(['train', '--config', config]) == 2  # without it there has to be a workdir


@pytest.mark.parametrize('config', ['vit/own.py', 'vit/finetune.py:auto', 'eomt/finetune.py'])
def test_help_config_needs_no_value_that_a_recipe_leaves_open(config, repo, capsys):
    assert cli.main(['train', '--config', f'{repo}/experiments/{config}', '--help-config']) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ('config.init', 'posemb', 'config.task', 'name'))


def test_keys_are_listed_as_the_page(capsys):
    assert cli.main(['list', 'keys', 'name=vit']) == 0
    out = capsys.readouterr().out
    assert '## config.model, name=vit' in out and 'config.task' not in out
