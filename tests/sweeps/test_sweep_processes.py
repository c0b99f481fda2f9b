"""Two processes, one device each, that are one worker: they train every trial together."""

import os
import re
import subprocess

import pytest

pytest.importorskip('optuna')

from helpers import forked
from helpers.messages import mentions
from helpers.runs import undrawn  # noqa: F401
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.checkpoints.checkpointer import load_variables
from vit_jax.sweeps import study
from vit_jax.sweeps.space import Sweep

pytestmark = [pytest.mark.process, pytest.mark.slow]

METRIC = 'test/loss'
SMALL = {
    'model.dropout': 0.0,
    'total': '4 steps',
    'every.eval': '2',
    'every.checkpoint': '4',
}


def work_together(repo, folder, port):
    """Exit codes and outputs of both."""
    words = ['sweep', 'work', 'name', '--workdir', folder, '--allow', 'helpers']
    words += ['--heartbeat', '30']
    meeting = ['--coordinator', f'127.0.0.1:{port}', '--num-processes', '2', '--process-id']
    flags = re.sub(r'\S*host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', ''))
    processes = [
        forked.start(
            [*words, *meeting, rank],
            {**os.environ, 'XLA_FLAGS': flags},
            cwd=repo,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
        return [process.returncode for process in processes], outputs
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_processes_share_every_trial(repo, tmp_path, monkeypatch, free_port, one_device):
    """Of three points one cannot be split between two devices, and one is pruned after step 2."""
    monkeypatch.chdir(repo)
    common = {'batch_size': 16, 'seed': 0}
    points = [
        {**common, 'optim.lr': 0.003},
        {**common, 'optim.lr': 0.003, 'batch_size': 15},
        {**common, 'optim.lr': 3000.0},
    ]
    sweep = Sweep(
        config='tests/helpers/linear.py',
        metric=METRIC,
        direction='minimize',
        points=points,
        pruner='median',
        pruner_options={'n_startup_trials': 1},
        overrides=SMALL,
    )
    made = study.create(sweep, 'name', folder=tmp_path / 'study')
    codes, outputs = work_together(repo, made.folder, free_port)
    assert codes == [2, 2], outputs
    first, failed, pruned = made.trials()
    assert first.state == TrialState.COMPLETE, outputs
    assert [t.params for t in made.trials()] == points
    assert (pruned.state, list(pruned.intermediate_values)) == (TrialState.PRUNED, [2])
    assert failed.state == TrialState.FAIL
    assert 'batch_size' in failed.user_attrs['error']
    assert 'trial 1: complete' in outputs[0]
    assert 'complete' not in outputs[1]
    assert all(mentions(text, '1 of 3', 'trial 2') for text in outputs)

    step, _, meta = load_variables(made.run_folder(0) / 'checkpoints')
    assert (step, meta['hardware']) == (4, '2 x cpu (jit)')
    alone = study.create(
        Sweep(sweep.config, METRIC, points=points[:1], overrides=SMALL), 'one', folder=tmp_path
    )
    assert main(['sweep', 'work', 'one', '--workdir', str(tmp_path), '--allow', 'helpers']) == 0
    (trial,) = alone.trials()
    assert trial.value == pytest.approx(first.value, rel=1e-4)
