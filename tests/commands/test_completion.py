"""Completion of commands, actions and flags in shells, and `--version`."""

import contextlib
import os
import pty
import shutil
import subprocess
import sys

import pytest

import vit_jax
from vit_jax import __main__ as cli

TRY = """
source {script}
COMP_LINE='{line}' COMP_POINT={point} COMP_TYPE=9
_python_argcomplete vit-jax 2> /dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p python 2> /dev/null || true
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with the program, its script for bash, and a picture."""
    folder = tmp_path_factory.mktemp('completion')
    with (folder / 'complete.sh').open('w') as file, contextlib.redirect_stdout(file):
        assert cli.main(['--completion', 'bash']) == 0
    program = folder / 'vit-jax'
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m vit_jax "$@"\n')
    program.chmod(0o755)
    (folder / 'photo.png').touch()
    (folder / 'own.py').write_text("def get_config(variant='S/16', fast=False):\n    return None\n")
    return folder


def complete(folder, line):
    code = TRY.format(script=folder / 'complete.sh', line=line, point=len(line))
    env = {**os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}'}
    done = subprocess.run(
        ['bash', '-c', code], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return [word.rstrip() for word in done.stdout.splitlines() if word]


@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('vit-jax tr', ['train', 'translate']),
        ('vit-jax sweep st', ['status']),
        ('vit-jax sweep work s --tri', ['--trials']),
        ('vit-jax train vit/digits --workdir a --stri', ['--strict']),
        ('vit-jax train eomt/scen', ['eomt/scenes', 'eomt/scenes_vit_s14']),
        ('vit-jax list trans', ['transforms']),
        (
            'vit-jax train vit/digits --config.optim.schedule.warm',
            ['--config.optim.schedule.warmup='],
        ),
        ('vit-jax train vit/digits --config.model.head.bi', ['--config.model.head.bias=']),
        ('vit-jax train vit/digits --config.model.opt', []),
        ('vit-jax train vit/digits --config.init.fr', ['--config.init.from=']),
        ('vit-jax train vit/digits --config.task.mix', ['--config.task.mixup=']),
        ('vit-jax train swin/imagenet --config.model.wind', ['--config.model.window=']),
        (
            'vit-jax train vit/digits:',
            ['adafactor', 'adamw', 'lion', 'optimizer=', 'sgd', 'smoke'],
        ),
        ('vit-jax train vit/digits:optimizer=li', ['lion']),
        ('vit-jax train own.py:B/16,fa', ['B/16,fast=']),
        ('vit-jax predict runs/a pho', ['photo.png']),
    ],
)
def test_bash_completes(folder, line, expected):
    assert sorted(complete(folder, line)) == expected


def test_completion_needs_no_jax(folder):
    """So that it is fast."""
    code = (
        'import sys; from vit_jax.commands import _completion; _completion.override_flags();'
        '[_completion.find_parser(name) for name in '
        "('train', 'predict', 'list', 'evaluate', 'report', 'sample', 'inspect', 'colorize')];"
        "_completion.complete_config('vit/');"
        "assert not {'jax', 'flax', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, '-c', code], check=True)


# Of every line, TAB inserts all that it may become, and ^T writes it down.
ZSHRC = """
PS1='ready> '
source {script}
zstyle ':completion:all:*' completer _all_matches _complete
zstyle ':completion:all:*' insert yes
zle -C all complete-word _generic
bindkey '^I' all
note() {{ print -r -- "$BUFFER" >> {completions}; BUFFER= }}
zle -N note
bindkey '^T' note
"""
IN_ZSH = {
    'vit-jax tr': 'train translate',
    'vit-jax train --help-': '--help-config',
    'vit-jax sweep st': 'status',
    'vit-jax train eomt/scenes_': 'eomt/scenes_vit_s14',
    'vit-jax train vit/digits --config.batch': '--config.batch_size=',
    'python phot': 'photo.png',
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('zsh') is None, reason='zsh is not installed')
def test_zsh_completes(folder, tmp_path, capsys):
    assert cli.main(['--completion', 'zsh']) == 0
    script, completions = tmp_path / 'complete.zsh', tmp_path / 'found'
    script.write_text(capsys.readouterr().out)
    (tmp_path / '.zshrc').write_text(ZSHRC.format(script=script, completions=completions))
    (tmp_path / 'photo.png').touch()
    leader, follower = pty.openpty()
    env = {**os.environ, 'ZDOTDIR': str(tmp_path), 'HOME': str(tmp_path), 'TERM': 'dumb'}
    env['PATH'] = f'{folder}:{env["PATH"]}'
    argv = ['zsh', '-d', '-i']
    with (
        subprocess.Popen(
            argv, stdin=follower, stdout=follower, stderr=follower, cwd=tmp_path, env=env,
            start_new_session=True,
        ) as zsh,
        os.fdopen(leader, 'r+b', buffering=0) as terminal,
    ):  # fmt: skip
        os.close(follower)
        output = b''
        while b'ready> ' not in output:
            output += terminal.read(1000)
        terminal.write(''.join(f'{line}\t\x14' for line in IN_ZSH).encode() + b'exit\n')
        with contextlib.suppress(OSError):  # the terminal is gone
            while terminal.read(1000):
                pass
        zsh.wait(60)
    completed = [sorted(line.split()) for line in completions.read_text().splitlines()]
    expected = [f'{line.rpartition(" ")[0]} {ends}' for line, ends in IN_ZSH.items()]
    assert completed == [sorted(line.split()) for line in expected]


def test_unknown_shells_are_one_line(capsys):
    assert cli.main(['--completion', 'fish']) == 2
    assert 'valid: bash, zsh' in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(['--version']) == 0
    assert capsys.readouterr().out == f'vit_jax {vit_jax.__version__}\n'
