"""The watch over steps: it ends what hangs, and nothing else."""

import subprocess
import sys
import time

import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.runtime import watchdog

HANGS = """
import time
from vit_jax.runtime.watchdog import Watchdog

def stuck():
    time.sleep(60)

with Watchdog(0.5) as watch:
    watch.beat('step 7')
    stuck()
"""


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_process_and_says_where(repo):
    process = subprocess.run(
        [sys.executable, '-c', HANGS], cwd=repo, capture_output=True, text=True, timeout=50
    )
    assert process.returncode == 1
    assert mentions(process.stderr, 'process 0 of 1', 'step 7', '0.5 s')
    assert 'in stuck' in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [0.2, None])
def test_who_goes_on_is_left_alone(seconds, monkeypatch):
    ended = []
    monkeypatch.setattr(watchdog.os, '_exit', ended.append)
    with watchdog.Watchdog(seconds) as watch:
        for step in range(10):
            time.sleep(0.05)
            watch.beat(f'step {step}')
    time.sleep(0.4)  # the watch is over
    assert not ended


def test_a_timeout_is_a_number_of_seconds(repo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(repo)
    words = ['train', '--config', 'experiments/vit/digits.py:smoke', '--workdir']
    assert main([*words, str(tmp_path / 'run'), '--step-timeout=-1']) == 2
    assert mentions(capsys.readouterr().err, '--step-timeout', '-1')
    assert not (tmp_path / 'run').exists()
