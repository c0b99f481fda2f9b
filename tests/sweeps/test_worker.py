"""Workers without training: every trial exactly once, claims, what is tried again."""

import math
import os
import re
import signal
import socket
from collections import Counter

import pytest
from helpers.messages import says

pytest.importorskip('optuna')

from helpers import forked
from helpers.studies import METRIC, make
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.runtime.preemption import Preemption
from vit_jax.storage import run_folder
from vit_jax.sweeps import picture, study, worker
from vit_jax.sweeps.space import grid, log_uniform
from vit_jax.trainer import train
from vit_jax.trainer.meter import Diverged

STORAGES = ('journal', 'sqlite')


WORKER = """
import sys
from vit_jax.trainer import train
from vit_jax.sweeps import study, worker

def run(config, folder, report, **_):
    with open(sys.argv[2], 'a') as file:
        file.write(f'{config.seed} {config.optim.lr}\\n')
    return {'test/accuracy': config.optim.lr}

train.train = run
worker.work(study.open_study('name', folder=sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('storage', STORAGES)
def test_two_workers_run_each_point_of_a_grid_exactly_once(tmp_path, repo, storage):
    values = {'seed': [0, 1, 2], 'optim.lr': [0.1, 0.2]}
    made = make(tmp_path, storage, points=grid(values))
    logs = [tmp_path / f'{i}.txt' for i in (0, 1)]
    workers = [forked.start([tmp_path, log], os.environ, code=WORKER, cwd=repo) for log in logs]
    assert [process.wait() for process in workers] == [0, 0]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    assert Counter(lines) == {f'{seed} {lr}': 1 for seed in range(3) for lr in (0.1, 0.2)}
    assert picture.counts(made) | {'complete': 6} == picture.counts(made)
    assert len(made.trials()) == 6


@pytest.mark.slow
@pytest.mark.parametrize('storage', ['journal', pytest.param('sqlite', marks=pytest.mark.long)])
def test_a_trial_that_lost_its_worker_is_taken_up_by_another(tmp_path, storage, fake_training):
    make(tmp_path, storage, space={'optim.lr': log_uniform(1e-4, 1e-1)}, trials=2)
    first = study.open_study('name', folder=tmp_path)
    with worker.claim_trial(first) as trial:
        point = worker.suggest(first, trial)
        trial.report(0.25, 1)
        second = study.open_study('name', folder=tmp_path)
        with worker.claim_trial(second) as other:
            assert (trial.number, other.number) == (0, 1)
    # Both ended without a word to the study.
    fake_training(lambda config, step: 0.25 * step)
    second = study.open_study('name', folder=tmp_path)
    assert worker.work(second).finished == 2
    frozen = second.trials()[0]
    assert (frozen.state, frozen.params, frozen.value) == (TrialState.COMPLETE, point, 0.75)
    assert frozen.intermediate_values == {1: 0.25, 2: 0.5, 3: 0.75}


@pytest.mark.slow
def test_a_trial_that_kills_its_workers_fails_in_the_end(tmp_path, monkeypatch, capsys):
    made = make(tmp_path, points=grid({'seed': [0, 1]}), retries=2)

    def killed(config, folder, report, **_):
        if config.seed == 0:
            raise KeyboardInterrupt  # which tells the study as little as a SIGKILL
        return {METRIC: 0.5}

    monkeypatch.setattr(train, 'train', killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            worker.work(made)
        assert picture.rows(made)[0][:2] == ['1', 'interrupted']
    assert worker.work(made).finished == 1
    assert [row[1] for row in picture.rows(made)] == ['fail', 'complete']
    assert says(picture.remarks(made), 'trial 1', '3 times', 'step 0')


def test_a_trial_that_gets_further_each_time_is_not_given_up(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0]}), retries=0)
    monkeypatch.setattr(run_folder, 'steps', lambda folder: saved)
    saved: list[int] = []

    def killed(config, folder, report, **_):
        saved.append(len(saved) + 1)
        raise KeyboardInterrupt

    def preempted(config, folder, report, **_):
        raise train.Preempted

    monkeypatch.setattr(train, 'train', killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            worker.work(made)
    monkeypatch.setattr(train, 'train', preempted)
    for _ in range(3):
        with pytest.raises(train.Preempted):
            worker.work(made)
    tally = picture.counts(made)
    assert (tally['running'], tally['interrupted']) == (0, 1)


def test_status_names_the_worker_and_the_time_that_is_left(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'seed': [0, 1, 2, 3]}))
    fake_training(lambda config, step: 0.5)
    worker.work(made, 1)
    assert picture.remarks(made) == []
    with worker.claim_trial(made) as trial:
        owner = f'running on {socket.gethostname()}:{os.getpid()}'
        assert picture.rows(made)[1][:2] == [str(trial.number + 1), owner]
        (line,) = picture.remarks(made)
        assert re.fullmatch(r'about 0:00:\d\d left: 3 trials of 0:00:\d\d .*workers: 1', line)
    assert picture.rows(made)[1][1] == 'interrupted'


def test_a_failed_trial_is_queued_again_once_and_goes_on_in_its_folder(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0, 1]}))
    folders = []

    def run(config, folder, report, **_):
        folders.append(folder.name)
        if config.seed == 1 and folders.count('0002') < 3:
            raise UserError('the data are away')
        return {METRIC: 0.5}

    monkeypatch.setattr(train, 'train', run)
    assert study.retry(made) == 0
    worker.work(made)
    for _ in range(2):
        assert study.retry(made) == 1
        assert study.retry(made) == 0
        worker.work(made)
    assert folders == ['0001', '0002', '0002', '0002']
    states = [row[1] for row in picture.rows(made)]
    assert states == ['complete', 'fail', 'fail', 'complete']
    assert made.trials()[-1].params == {'seed': 1}


def test_a_stop_between_two_trials_is_heard(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0, 1]}))

    def run(config, folder, report, **_):
        with Preemption():
            os.kill(os.getpid(), signal.SIGINT)  # after the last step: too late for this run
        return {METRIC: 0.5}

    monkeypatch.setattr(train, 'train', run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(train.Preempted, match='after trial 1'):
            worker.work(made)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert picture.counts(made) | {'complete': 1, 'waiting': 1} == picture.counts(made)


def test_a_trial_that_ended_before_it_was_claimed_is_left_alone(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'seed': [0]}))
    (waiting,) = made.trials()
    fake_training(lambda config, step: 1.0)
    worker.work(made)
    assert worker.take(made, waiting) is None


def test_the_resolved_config_of_every_trial_is_stored(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'optim.lr': [0.5]}), overrides={'seed': 7})
    fake_training(lambda config, step: 1.0)
    worker.work(made)
    (trial,) = study.open_study('name', folder=tmp_path).trials()
    stored = trial.user_attrs['config']
    assert (stored['optim']['lr'], stored['seed'], stored['model']['name']) == (0.5, 7, 'vit')
    assert trial.user_attrs['folder'] == str(tmp_path / '0001')


def test_what_diverges_is_counted_as_such_and_what_cannot_run_fails(tmp_path, monkeypatch, capsys):
    def run(config, folder, report, **_):
        if config.seed == 0:
            raise Diverged('step 3: not finite')
        if config.seed == 1:
            raise UserError('no such data')
        return {METRIC: math.nan if config.seed == 2 else 0.5}

    monkeypatch.setattr(train, 'train', run)
    made = make(tmp_path, points=grid({'seed': [0, 1, 2, 3]}))
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert says(printed.err, 'error: 1 of 4 trials', 'trial 2: no such data')
    assert 'trial 1: diverged\n' in printed.out and 'pruned' not in printed.out
    states = [row[1] for row in picture.rows(made)]
    assert states == ['diverged', 'fail', 'diverged', 'complete']
    assert main(['sweep', 'status', 'name', '--workdir', str(tmp_path)]) == 0
    tally = capsys.readouterr().out.splitlines()[1]
    assert 'pruned 0' in tally and 'diverged 2' in tally


def test_an_evaluation_without_the_metric_says_nothing_of_the_trial(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0]}))

    def run(config, folder, report, **_):
        assert not report(1, {METRIC.replace('/', '_bleu/'): 0.1})  # another entry's
        report(2, {METRIC: 0.7})
        return {METRIC: 0.9}

    monkeypatch.setattr(train, 'train', run)
    assert worker.work(made).failures == []
    (trial,) = made.trials()
    assert trial.intermediate_values == {2: 0.7}
    assert trial.value == 0.9
