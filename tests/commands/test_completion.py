"""The script for the shell completes commands, actions and flags; `--version` tells the version."""

import shutil
import subprocess

import pytest

import vit_jax
from vit_jax import __main__ as cli

TRY = """
source {script}
COMP_WORDS=({words} '{last}')
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_vit_jax
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture(scope='module')
def script(tmp_path_factory):
    from vit_jax.commands import _completion

    path = tmp_path_factory.mktemp('completion') / 'complete.sh'
    path.write_text(_completion.script('bash', cli.commands()))
    return path


@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('python -m vit_jax tr', 'train translate'),
        ('python -m vit_jax train --help-', '--help-config'),
        ('python -m vit_jax train --workdir a --stri', '--strict'),
        ('python -m vit_jax sweep st', 'status'),
        ('python -m vit_jax sweep work s --tri', '--trials'),
        ('python other.py --', ''),
        ('python -m vit', ''),
    ],
)
def test_bash_completes(script, line, expected):
    *words, last = line.split()
    code = TRY.format(script=script, words=' '.join(words), last=last)
    done = subprocess.run(['bash', '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
    assert not done.stderr


def test_every_command_is_completed(script):
    words = script.read_text()
    assert all(f'    {command}/' in words for command in cli.commands())


@pytest.mark.skipif(shutil.which('zsh') is None, reason='zsh is not installed')
def test_zsh_reads_its_script(capsys):
    assert cli.main(['--completion', 'zsh']) == 0
    code = f'compdef() {{ true; }}\n{capsys.readouterr().out}\n_vit_jax_words sweep ""'
    done = subprocess.run(['zsh', '-c', code], capture_output=True, text=True, check=True)
    assert 'create' in done.stdout


def test_shells_that_are_not_known_are_told(capsys):
    assert cli.main(['--completion', 'fish']) == 2
    assert 'valid: bash, zsh' in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'vit_jax {vit_jax.__version__}\n'
