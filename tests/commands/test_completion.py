"""The script for the shell completes commands, actions and flags; `--version` tells the version."""

import contextlib
import os
import pty
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
    path = tmp_path_factory.mktemp('completion') / 'complete.sh'
    with path.open('w') as file, contextlib.redirect_stdout(file):
        assert cli.main(['--completion', 'bash']) == 0
    return path


@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('python -m vit_jax tr', 'train translate'),
        ('python -m vit_jax train --help-', '--help-config'),
        ('python -m vit_jax train --workdir a --stri', '--strict'),
        ('python -m vit_jax sweep st', 'status'),
        ('python -m vit_jax sweep work s --tri', '--trials'),
        ('vit-jax tr', 'train translate'),
        ('.venv/bin/vit-jax sweep work s --tri', '--trials'),
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


# Of every line, TAB inserts all that it may become, and ^T writes it down.
ZSHRC = """
PS1='ready> '
source {script}
zstyle ':completion:all:*' completer _all_matches _complete
zstyle ':completion:all:*' insert yes
zle -C all complete-word _generic
bindkey '^I' all
note() {{ print -r -- "$BUFFER" >> {found}; BUFFER= }}
zle -N note
bindkey '^T' note
"""
IN_ZSH = {
    'python -m vit_jax tr': 'train translate',
    'python3 -m vit_jax train --help-': '--help-config',
    '.venv/bin/python -m vit_jax train --workdir a --stri': '--strict',
    'python -m vit_jax sweep st': 'status',
    'vit-jax sweep st': 'status',
    'python -m vit_jax sweep work s --tri': '--trials',
    'python -m vit_jax predict --workdir photo': 'photo.png',
    'python phot': 'photo.png',
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('zsh') is None, reason='zsh is not installed')
def test_zsh_completes(tmp_path, capsys):
    assert cli.main(['--completion', 'zsh']) == 0
    script, found = tmp_path / 'complete.zsh', tmp_path / 'found'
    script.write_text(capsys.readouterr().out)
    (tmp_path / '.zshrc').write_text(ZSHRC.format(script=script, found=found))
    (tmp_path / 'photo.png').touch()
    ours, theirs = pty.openpty()
    env = {**os.environ, 'ZDOTDIR': str(tmp_path), 'HOME': str(tmp_path), 'TERM': 'dumb'}
    words = ['zsh', '-d', '-i']
    with (
        subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env,
            start_new_session=True,
        ) as zsh,
        os.fdopen(ours, 'r+b', buffering=0) as terminal,
    ):  # fmt: skip
        os.close(theirs)
        said = b''
        while b'ready> ' not in said:
            said += terminal.read(1000)
        terminal.write(''.join(f'{line}\t\x14' for line in IN_ZSH).encode() + b'exit\n')
        with contextlib.suppress(OSError):  # the terminal is gone
            while terminal.read(1000):
                pass
        zsh.wait(60)
    completed = [line.rstrip() for line in found.read_text().splitlines()]
    assert completed == [
        f'{line.rpartition(" ")[0]} {expected}' for line, expected in IN_ZSH.items()
    ]


def test_shells_that_are_not_known_are_told(capsys):
    assert cli.main(['--completion', 'fish']) == 2
    assert 'valid: bash, zsh' in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'vit_jax {vit_jax.__version__}\n'
