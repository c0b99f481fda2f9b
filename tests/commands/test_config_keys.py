"""Every key is described where it is defined, and the page of all keys is current."""

import importlib.util
import pathlib

import pytest

from vit_jax import __main__ as cli
from vit_jax.commands import _config_keys
from vit_jax.config import load


@pytest.fixture(scope='module')
def package():
    return _config_keys.package_keys()


def test_every_key_has_a_line(package):
    assert package
    assert [key.name for keys in package.values() for key in keys if not key.line] == []


def test_the_pages_are_current(package, repo: pathlib.Path):
    path = repo / 'docs' / 'site' / 'keys.py'
    spec = importlib.util.spec_from_file_location('keys', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages = module.lay_out(package)
    assert {path: path.read_text() for path in pages} == pages, 'run `make docs`'
    assert _config_keys.KEYS.read_text() == _config_keys.named_keys(package), 'run `make docs`'
    assert {*(repo / 'docs' / 'config').iterdir()} == pages.keys() - {repo / 'docs' / 'config.md'}


def test_values_of_a_config_stand_beside_defaults(repo: pathlib.Path):
    config = load.load(f'{repo}/experiments/vit/digits.py', ['optim.lr=0.5'])
    found = {
        f'{section}.{key.name}': key
        for section, keys in _config_keys.config_keys(config).items()
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


class Base:
    """A base.

    Attributes:
      width: of a token.
      depth: number
        of blocks: all of them.
    """


class Derived(Base):
    """One that says less.

    Args:
      depth, height: other things; 'a', or
        'b'. Two sentences.

    Raises:
      UserError: never.
    """


def google(learning_rate, b1):
    """In another style.

    Args:
        learning_rate (float): the rate.
        **b1: `decay`.

    Returns:
        x: nothing.
    """


def test_entries_go_on_below_and_several_names_share_one():
    assert _config_keys.parameter_docs(Base) == {
        'width': 'of a token.',
        'depth': 'number of blocks: all of them.',
    }
    text = "other things; 'a', or 'b'. Two sentences."
    expected = {'width': 'of a token.', 'depth': text, 'height': text}
    assert _config_keys.parameter_docs(Derived) == expected


def test_other_sections_and_styles():
    assert _config_keys.parameter_docs(google) == {'learning_rate': 'the rate.', 'b1': '`decay`.'}
    assert _config_keys.parameter_docs(lambda: None) == {}


def test_first_sentence():
    assert (
        _config_keys.sentence("at 0.5 or more, as 'a.b'. Then more.") == "at 0.5 or more, as 'a.b'"
    )
    assert _config_keys.sentence('of a token.') == 'of a token'
