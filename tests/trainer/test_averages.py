"""Several averages of a run's parameters: kept, evaluated, read by name, and warmed up."""

from __future__ import annotations

import json

import jax
import numpy as np
import optax
import pytest
from helpers.digests import tree_digest
from helpers.runs import digest

import vit_jax
from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.config.run import Durations, Schedule, Step
from vit_jax.errors import UserError
from vit_jax.inference.load import read
from vit_jax.step import init_state, with_average
from vit_jax.storage.run_folder import read_metrics
from vit_jax.trainer import train
from vit_jax.trainer.workdir import settle_warmup
from vit_jax.viz import curves

FAST, SLOW = 0.5, 0.9
ALLOW = ('--allow', 'helpers')


def averages_after(steps: int, step: Step, times: Durations | None = None) -> list[float]:
    """Return the averages of the number of steps, which begins at 0."""
    decays = step.ema_decays
    state = init_state({'params': {'w': np.zeros(())}}, optax.identity(), 0, True, decays[1:])

    def take(state, batch):
        return state.replace(step=state.step + 1, params={'w': state.params['w'] + 1.0}), {}

    stepping = with_average(take, step, times)
    for _ in range(steps):
        state, _ = stepping(state, {})
    kept = [state.ema, *(state.other_emas or {}).values()]
    assert [float(tree['w']) for tree in kept] == [
        float(state.variables_at(decay)['params']['w']) for decay in decays
    ]
    return [float(tree['w']) for tree in kept]


def test_each_average_follows_its_decay():
    fast, slow = averages_after(2, Step(ema_decay=(FAST, SLOW)))
    assert (fast, slow) == (pytest.approx(0.25 + 1), pytest.approx(0.09 + 0.2))
    assert averages_after(2, Step(ema_decay=FAST)) == [fast]
    assert averages_after(2, Step(ema_decay=(FAST,))) == [fast]


@pytest.mark.parametrize('schedule', [Schedule(), Schedule(name='linear', final=0.9)])
def test_a_warm_up_bounds_the_decay_by_the_step(schedule):
    step = Step(ema_decay=0.999, ema_warmup=True, ema_schedule=schedule)
    average = 0.0
    for t in range(3):
        average += (1 - (1 + t) / (10 + t)) * (t + 1 - average)
    assert averages_after(3, step, Durations(1, 1, 10)) == [pytest.approx(average)]


@pytest.mark.parametrize('decays', [(), (0.9, 0.9), (0.9, 1.5), (0.0, 0.9), ('a',)])
def test_other_decays_are_refused(decays):
    with pytest.raises(UserError, match='ema_decay'):
        Step(ema_decay=decays)


@pytest.fixture(scope='module')
def make_config(repo):
    def make(*overrides):
        config = load.load(str(repo / 'tests/helpers/linear.py'))
        with config.unlocked():
            config.evals.slow = config.evals.test.copy_and_resolve_references()
            config.evals.bare = config.evals.test.copy_and_resolve_references()
            config.evals.slow.ema_decay, config.evals.bare.ema_decay = SLOW, 0
        given = ['total=6 steps', 'every.eval=3', 'every.checkpoint=3', 'every.examples=']
        given += [f'step.ema_decay=({FAST}, {SLOW})', 'step.ema_warmup=False']
        given += ['checkpoint.keep_best=slow/accuracy']
        return load.override(config, [*given, *overrides])

    return make


@pytest.fixture(scope='module')
def run(make_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('averages') / 'run'
    train.train(make_config(), folder, devices=jax.devices()[:1])
    return folder


@pytest.mark.slow
def test_a_resumed_run_has_the_same_averages(make_config, run, tmp_path):
    with pytest.raises(train.Preempted):
        train.train(make_config(), tmp_path / 'run', devices=jax.devices()[:1], stop_at=3)
    train.train(make_config(), tmp_path / 'run', devices=jax.devices()[:1])
    assert digest(tmp_path / 'run') == digest(run)


@pytest.mark.slow
def test_every_command_reads_the_average_that_is_named(run, capsys):
    def evaluated(*flags: str) -> dict[str, float]:
        assert main(['evaluate', str(run), *ALLOW, '--json', *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        return {name: found[f'{name}/loss'] for name in ('test', 'slow', 'bare')}

    (last,) = [line for line in read_metrics(run) if 'test/loss' in line and line['step'] == 6]
    own = evaluated()
    assert own == pytest.approx({name: last[f'{name}/loss'] for name in own}, rel=1e-6)
    assert len({*own.values()}) == 3
    for flag, name in (('none', 'bare'), (str(SLOW), 'slow'), (str(FAST), 'test')):
        assert evaluated('--average', flag) == pytest.approx(dict.fromkeys(own, own[name]))
    assert main(['evaluate', str(run), *ALLOW, '--average', '0.8']) == 2
    assert '0.5, 0.9' in capsys.readouterr().err
    digests = {
        average: tree_digest(vit_jax.load(run, average=average, allowed=ALLOW[1:])[1])
        for average in (1, FAST, SLOW, 'none')
    }
    assert digests[1] == digests[FAST] and len({*digests.values()}) == 3
    assert tree_digest(vit_jax.load(f'{run}@best', allowed=ALLOW[1:])[1]) in [
        tree_digest(read(run, step=step, average=SLOW, allowed=ALLOW[1:]).variables)
        for step in (3, 6)
    ]


@pytest.mark.slow
def test_a_new_run_warms_up_and_an_old_one_goes_on_as_it_began(make_config, repo, run, tmp_path):
    new = make_config('step.ema_warmup=None')
    assert settle_warmup(new, tmp_path).step.ema_warmup is True
    assert new.step.ema_warmup is None
    assert settle_warmup(new, run).step.ema_warmup is None, 'off there'
    old = repo / 'tests/golden/run_digits'
    assert settle_warmup(new, old).step.ema_warmup is None
    branch = load.override(new, [f'branch.from={old}', 'branch.step=10'])
    assert settle_warmup(branch, tmp_path).step.ema_warmup is None
    scheduled = load.override(new, ['step.ema_schedule.name=cosine', 'step.ema_schedule.final=1'])
    assert settle_warmup(scheduled, tmp_path).step.ema_warmup is None


def test_an_evaluation_of_no_average_of_the_run_is_refused(make_config):
    with pytest.raises(UserError, match=r'config.evals.test.ema_decay=0.8'):
        make_config('evals.test.ema_decay=0.8')


def test_curves_name_the_average(make_config):
    metrics = ['test/loss', 'slow/loss', 'bare/loss', 'train/lr']
    notes = curves.remarks(make_config().to_dict(), metrics)
    assert {name: notes.get(name, '') for name in metrics[:3]} == {
        'test/loss': 'EMA weights',
        'slow/loss': f'EMA weights {SLOW}',
        'bare/loss': '',
    }
