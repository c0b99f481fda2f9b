"""`list`: names and lines of what a config may name."""

import json
import re

import pytest
from helpers.messages import says

from vit_jax import __main__ as cli
from vit_jax.commands import _catalog
from vit_jax.commands import list as command
from vit_jax.models import vit


def run(capsys, *argv):
    assert cli.main(['list', *argv]) == 0
    return capsys.readouterr().out


def test_every_kind_is_listed_by_default(capsys):
    assert json.loads(run(capsys, '--json')).keys() == command.KINDS.keys()
    assert 'schedules' in run(capsys)


@pytest.mark.parametrize('kind', ['models', 'transforms'])
def test_text_and_json_have_the_same_names(capsys, kind):
    text, entries = run(capsys, kind), json.loads(run(capsys, kind, '--json'))
    assert entries
    assert all(entry['name'] in text and entry['line'] in text for entry in entries)


def test_words_choose_names(capsys):
    names = [entry['name'] for entry in json.loads(run(capsys, 'models', 'vit', 'detr', '--json'))]
    assert names == ['detr', 'detr_panoptic', 'rf_detr', 'vit', 'vit_adaptors', 'vit_factorized']
    assert json.loads(run(capsys, 'variants', 'nothing', '--json')) == []


@pytest.mark.parametrize(
    'kind', ['models', 'keys', 'experiments', 'variants', 'checkpoints', 'commands']
)
def test_words_that_choose_nothing_are_refused(capsys, kind):
    assert cli.main(['list', kind, 'nonsense', 'gibberish']) == 2
    assert says(capsys.readouterr().err, 'error: ', kind, 'nonsense', 'gibberish')


def test_experiments_show_their_arguments(capsys, repo):
    experiments = json.loads(
        run(capsys, 'experiments', '--folder', f'{repo}/experiments/vit', '--json')
    )
    (digits,) = (
        experiment for experiment in experiments if experiment['name'].endswith('digits.py')
    )
    assert 'smoke' in digits['arguments'].split()


def test_experiments_and_sweeps_are_listed_by_the_command_that_takes_them(capsys):
    out = run(capsys, 'experiments', 'sweeps/digits', 'vit/digits', 'mask_ratio')
    configs, sweeps = out.split('for sweep create:')
    assert 'for train --config:' in configs and 'vit/digits:' in configs
    assert 'sweeps/digits:' in sweeps and 'mae/mask_ratio:' in sweeps and 'vit/' not in sweeps


def test_words_choose_keys_by_their_meaning(capsys):
    sections = json.loads(run(capsys, 'keys', 'beta distribution', '--json'))
    assert 'mixup' in [key['name'] for key in sections['config.task, name=classify']]


@pytest.mark.slow
def test_variants_are_a_table(capsys, monkeypatch):
    monkeypatch.setattr(vit, 'VARIANTS', {name: vit.VARIANTS[name] for name in ('mu', 'B')})
    out = run(capsys, 'variants', 'vit', '--image-size', '64')
    assert 'mu/16' in out and 'B/16' in out and 'one image of 64 x 64' in out
    assert cli.main(['list', 'variants', '--image-size', '0']) == 2


def test_released_checkpoints_have_two_lines_each(capsys):
    out = run(capsys, 'checkpoints').splitlines()
    checkpoints = json.loads(run(capsys, 'checkpoints', '--json'))
    names = [line.strip() for line in out if line.startswith('  ') and line[2] != ' ']
    assert names == [checkpoint['name'] for checkpoint in checkpoints]
    assert {line for line in out if line[0] != ' '} == {
        checkpoint['source'] for checkpoint in checkpoints
    }
    assert max(len(line) for line in out if line.startswith('   ')) <= 100
    facts = ' '.join(out[out.index('  hf://facebook/dinov2-base') + 1].split())
    assert facts == '86.0 M 518 px LVD-142M, no labels 84.5 ImageNet, linear'


COMMANDS = _catalog.list_commands()
# Words that continue the name of a flag instead of saying what its value is.
CONTINUES = re.compile(
    r'(of|for|from|in|to|by|with|as|on|at|after|between|per|such as|instead of|only|default|see)\b'
)


@pytest.mark.parametrize('entry', COMMANDS, ids=lambda entry: entry.name)
def test_help_texts_say_what_a_value_is(entry):
    assert [flag for flag, text in entry.flags if not text or CONTINUES.match(text)] == []


def test_the_page_of_flags_is_current(repo, capsys):
    assert (repo / 'docs' / 'flags.md').read_text() == run(capsys, 'commands'), 'run `make docs`'
    assert run(capsys, 'commands', 'predict').startswith('## predict')
