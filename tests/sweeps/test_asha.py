"""ASHA: trials pause at rungs, the best go on, on any worker, and nothing is lost by a kill."""

import dataclasses
import json
import os
import socket

import pytest

pytest.importorskip('optuna')

from helpers.digests import tree_digest
from helpers.studies import METRIC, make
from optuna.trial import TrialState

from vit_jax.checkpoints.checkpointer import load_variables
from vit_jax.errors import UserError
from vit_jax.storage import lock
from vit_jax.sweeps import picture, study, worker
from vit_jax.sweeps.space import Sweep, grid
from vit_jax.trainer import train

STEPS = (1, 3, 9)
THIRDS = {'min_resource': 1, 'reduction_factor': 3}


def steps_of(made):
    """The last evaluated step of each trial."""
    return [trial.last_step for trial in made.trials()]


def of_seeds(folder, number, **fields):
    """A study of seeds in order."""
    points = grid({'seed': list(range(number))})
    options = {'pruner': 'asha', 'pruner_options': THIRDS, **fields}
    return make(folder, points=points, **options)


def better_before(config, step):
    """The metric of a run: better the smaller its seed."""
    return -config.seed + step / 100


def test_a_third_goes_on_from_each_rung(tmp_path, fake_training):
    made = of_seeds(tmp_path, 9)
    fake_training(better_before, STEPS)
    assert worker.work(made).failures == []
    assert steps_of(made) == [9, 3, 3, 1, 1, 1, 1, 1, 1]
    assert picture.counts(made) | {'complete': 1, 'pruned': 8, 'paused': 0} == picture.counts(made)
    assert picture.best(made).params == {'seed': 0}


@pytest.mark.slow
def test_hyperband_lets_the_first_trials_of_a_bracket_pass_and_asha_does_not(
    tmp_path, fake_training
):
    """Optuna pauses no trial: of fewer than `reduction_factor` at a rung, the best so far goes on.

    Besides, no trial of its last bracket is ever pruned.
    """
    fake_training(lambda config, step: (0, 1, *range(99, 89, -1))[config.seed] + step / 100, STEPS)
    options = {'min_resource': 1, 'max_resource': 9, 'reduction_factor': 3}
    band = of_seeds(tmp_path / 'band', 12, pruner='hyperband', pruner_options=options)
    worker.work(band)
    complete = [trial.number for trial in band.trials(TrialState.COMPLETE)]
    assert complete[:2] == [0, 1]
    made = of_seeds(tmp_path / 'asha', 12)
    worker.work(made)
    assert not {0, 1} & {trial.number for trial in made.trials(TrialState.COMPLETE)}
    assert sum(steps_of(made)) < sum(steps_of(band)) / 2


@pytest.mark.slow
@pytest.mark.parametrize('storage', ['journal', pytest.param('sqlite', marks=pytest.mark.long)])
def test_a_worker_promotes_what_another_paused(tmp_path, storage, fake_training):
    def stopped(config, step):
        if config.seed == 3:
            raise train.Preempted
        return better_before(config, step)

    made = of_seeds(tmp_path, 9, storage=storage)
    fake_training(stopped, STEPS)
    with pytest.raises(train.Preempted):
        worker.work(made)
    tally = picture.counts(made)
    assert (tally['paused'], tally['interrupted'], tally['waiting']) == (3, 1, 5)
    assert [row[1] for row in picture.rows(made)] == ['paused'] * 3 + ['interrupted']
    fake_training(better_before, STEPS)
    worker.work(study.open_study('name', folder=tmp_path))
    assert steps_of(made) == [9, 3, 3, 1, 1, 1, 1, 1, 1]


@pytest.mark.fault(48)
def test_a_promotion_whose_worker_is_killed_is_taken_up(tmp_path, fake_training):
    made = of_seeds(tmp_path, 3)
    for seed in (2, 1, 0):
        with worker.claim_trial(made) as trial:
            worker.suggest(made, trial)
            trial.report(seed, 1)
    with worker.claim_trial(made) as trial:
        assert (trial.number, trial.user_attrs['promoted']) == (0, 1)
    fake_training(better_before, STEPS)
    assert worker.work(made).finished == 1
    assert steps_of(made) == [9, 1, 1]


def test_a_worker_waits_for_what_another_is_at(tmp_path, monkeypatch, fake_training):
    made = of_seeds(tmp_path, 3)
    fake_training(better_before, STEPS)
    waited = []
    with worker.claim_trial(made) as trial:
        worker.suggest(made, trial)

        def report_and_leave(seconds):
            waited.append(seconds)
            if len(waited) == 1:
                trial.report(5.0, 1)
            else:
                raise train.Preempted

        monkeypatch.setattr(worker.time, 'sleep', report_and_leave)
        with pytest.raises(train.Preempted):
            worker.work(study.open_study('name', folder=tmp_path))
    assert len(waited) == 2
    worker.work(made)
    assert steps_of(made) == [9, 1, 1]


@pytest.mark.fault(48)
def test_a_killed_worker_whose_process_id_lives_is_not_waited_for(
    tmp_path, monkeypatch, fake_training
):
    """As pid 1 of another container; the record is that of an earlier version."""
    made = of_seeds(tmp_path, 3)
    with worker.claim_trial(made) as trial:
        worker.suggest(made, trial)
        trial.report(-5.0, 1)
    claim = made.claim_folder(trial.number) / lock.LOCK
    claim.write_text(json.dumps({'host': socket.gethostname(), 'pid': os.getppid()}))
    monkeypatch.setattr(worker.time, 'sleep', lambda seconds: pytest.fail('it waits'))
    fake_training(better_before, STEPS)
    worker.work(made)
    assert steps_of(made) == [1, 9, 1]


def test_ties_do_not_add_to_those_that_go_on(tmp_path, fake_training):
    made = of_seeds(tmp_path, 6, direction='minimize')
    fake_training(lambda config, step: 0.5, STEPS)
    worker.work(made)
    assert steps_of(made) == [9, 3, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_paused_run_ends_as_one_that_never_stopped(tmp_path, one_device):
    """Nothing is due at the rung but the evaluation: the pause itself saves the state."""
    overrides = {'total': '6 steps', 'every.eval': '2', 'every.checkpoint': ''}
    digests = []
    for pruner, options in (('asha', {'min_resource': 2, 'reduction_factor': 2}), ('none', {})):
        folder = tmp_path / pruner
        points = grid({'optim.lr': [0.002, 0.001]})
        sweep = Sweep('tests/helpers/linear.py', METRIC, points=points, overrides=overrides)
        sweep = dataclasses.replace(sweep, pruner=pruner, pruner_options=options)
        study.create(sweep, pruner, folder=folder)
        made = study.open_study(pruner, folder=folder, allowed=['helpers'])
        assert worker.work(made).failures == []
        best = picture.best(made).number if pruner == 'asha' else best
        digests.append(tree_digest(load_variables(made.run_folder(best) / 'checkpoints')[1]))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({}, 'min_resource'),
        ({'min_resource': 0}, r'min_resource=0 .* 1'),
        ({'min_resource': 2, 'reduction_factor': 1}, r'reduction_factor=1 .* 2'),
        ({'min_resource': 2, 'brackets': 1}, 'brackets'),
    ],
)
def test_a_mistake_in_the_options_is_named(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path, points=grid({'seed': [0]}), pruner='asha', pruner_options=options)


def test_a_metric_that_is_no_number_never_goes_on(tmp_path, fake_training):
    made = of_seeds(tmp_path, 3)
    fake_training(lambda config, step: float('nan') if config.seed == 2 else config.seed, STEPS)
    worker.work(made)
    assert steps_of(made) == [1, 9, 1]
