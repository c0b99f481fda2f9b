"""Users without a home, and locales that are not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Whatever a test's own process has: no UTF-8 in names of files, and none on standard output.
ASCII = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


@pytest.mark.fault(75)
def test_a_user_without_a_home_has_no_cache_and_no_warnings(repo, tmp_path, run_cli):
    config = f'{repo}/tests/helpers/linear.py'
    words = ['train', '--config', config, '--config.total=1', '--workdir', tmp_path / 'run']
    nowhere = {'HOME': '/dev/null', 'XDG_CACHE_HOME': '', 'JAX_COMPILATION_CACHE_DIR': ''}
    done = run_cli(*words, env=nowhere)
    assert done.returncode == 0, done.stderr
    assert 'cache entry' not in done.stderr


@pytest.mark.fault(76)
def test_names_of_classes_do_not_depend_on_the_locale(repo, tmp_path, monkeypatch, capsys):
    for name in ('Größe', 'Zebra', '猫'):
        (tmp_path / 'train' / name).mkdir(parents=True)
        for i in range(8):
            file = tmp_path / 'train' / name / f'{i}.png'
            Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(file)
    flags = {'data.source': f'folder:{tmp_path}', 'data.transforms': '', 'batch_size': 8}
    words = ['data', '--config', 'tests/helpers/linear.py', '--batches=1']
    words += [f'--config.{key}={value}' for key, value in flags.items()]
    monkeypatch.chdir(repo)
    assert main(words) == 0
    # The last is as wide as two letters.
    assert 'Größe  8\nZebra  8\n猫     8\n' in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, '-m', 'vit_jax', *words],
        cwd=repo,
        env={**os.environ, 'PYTHONPATH': f'{repo}:{repo}/tests', **ASCII},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert 'Gr\\xf6\\xdfe  8\nZebra  8\n\\u732b     8\n' in done.stdout
