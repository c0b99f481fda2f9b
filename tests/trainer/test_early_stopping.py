"""The best evaluated step is kept, and a run that gets no better ends, however often it stops."""

import json
import shutil

import pytest
from helpers.messages import mentions
from helpers.xla import use_one_device

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.runtime.watchdog import Interrupted
from vit_jax.storage import run_folder
from vit_jax.trainer import build, early_stopping, loop, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]

# What the evaluations give: the best is between two checkpoints, and not the last.
ACCURACY = {2: 0.3, 4: 0.6, 6: 0.5, 8: float('nan'), 10: 0.4, 12: 0.6}


make_program = build.make_program
PROGRAMS = []


def compiled_once(*arguments):
    """The program of the first of these runs: they differ in nothing that is computed."""
    PROGRAMS[:] = PROGRAMS or [make_program(*arguments)]
    return PROGRAMS[0]


@pytest.fixture(scope='module')
def make_config(repo):
    def make(*overrides):
        config = load.load(str(repo / 'tests/helpers/linear.py'))
        every = ['every.log=4', 'every.eval=2', 'every.checkpoint=5']
        given = ['total=12 steps', *every, 'checkpoint.keep_last=1', *overrides]
        return load.override(config, given)

    return make


@pytest.fixture
def evaluated(monkeypatch):
    """The steps that were evaluated; results are those above, and cost nothing."""
    steps = []

    def results(training, state, names, told):
        steps.append(int(state.step))
        if told():
            raise Interrupted
        return {
            f'{name}/{metric}': sign * ACCURACY[steps[-1]]
            for name in names
            for metric, sign in (('accuracy', 1), ('loss', -1))
        }

    monkeypatch.setattr(loop, 'evaluate_due', results)
    monkeypatch.setattr(build, 'make_program', compiled_once)
    return steps


def best(folder):
    return checkpointer.load_variables(folder / 'checkpoints', 'best')[0]


@pytest.mark.parametrize(
    'goal', ['test/accuracy', pytest.param('min:test/loss', marks=pytest.mark.long)]
)
def test_the_best_step_is_saved_and_stays(make_config, tmp_path, evaluated, capsys, goal):
    train.train(make_config(f'checkpoint.keep_best={goal}'), tmp_path)
    assert run_folder.steps(tmp_path) == [4, 12], 'of equal ones the first; no multiple of 5'
    assert best(tmp_path) == 4
    words = 'lowest test/loss' if 'loss' in goal else 'highest test/accuracy'
    assert mentions(capsys.readouterr().out, 'keeps', 'step', words)


@pytest.mark.fault(59)
@pytest.mark.parametrize('stop', [3, pytest.param(9, marks=pytest.mark.long)])
def test_a_resumed_run_knows_what_it_knew(make_config, tmp_path, evaluated, stop):
    config = make_config('checkpoint.keep_best=test/accuracy')
    with pytest.raises(train.Preempted):
        train.train(config, tmp_path, stop_at=stop)
    (tmp_path / 'metrics.jsonl').unlink()
    assert best(tmp_path) == {3: 2, 9: 4}[stop]
    train.train(config, tmp_path)
    assert run_folder.steps(tmp_path) == [4, 12]
    assert best(tmp_path) == 4


def test_a_last_evaluation_that_was_cut_short_counts(make_config, tmp_path, evaluated, monkeypatch):
    config = make_config('checkpoint.keep_best=test/accuracy')
    monkeypatch.setitem(ACCURACY, 12, 0.7)
    whole = loop.evaluate_due

    def cut(training, state, names, told):
        if state.step == 12:
            raise Interrupted
        return whole(training, state, names, told)

    with monkeypatch.context() as patch:
        patch.setattr(loop, 'evaluate_due', cut)
        with pytest.raises(train.Preempted):
            train.train(config, tmp_path)
    assert best(tmp_path) == 4
    train.train(config, tmp_path)
    assert best(tmp_path) == 12


def test_a_run_without_a_best_step_says_so(make_config, tmp_path, evaluated, capsys, smoke_run):
    assert main(['evaluate', '--workdir', str(smoke_run), '--step', 'best']) == 2
    assert 'config.checkpoint.keep_best' in capsys.readouterr().err
    with pytest.raises(train.Preempted):
        train.train(make_config('checkpoint.keep_best=test/accuracy'), tmp_path, stop_at=1)
    with pytest.raises(UserError, match=r'best.*step.*test/accuracy'):
        best(tmp_path)


def test_a_metric_that_the_data_cannot_give_is_refused_before_the_first_step(repo):
    config = load.load(
        f'{repo}/experiments/detr/scenes.py:smoke', ['checkpoint.keep_best=ap/AP_large']
    )
    with pytest.raises(UserError, match=r'ap/AP_large.*measured'):
        build.build(config)


@pytest.fixture(scope='module')
def kept(repo, tmp_path_factory):
    """The first two steps of `smoke_run`, of which it kept the best, really evaluated."""
    folder = tmp_path_factory.mktemp('kept')
    overrides = ['every.eval=1', 'checkpoint.keep_best=test/loss']
    config = load.load(str(repo / 'experiments/vit/digits.py:smoke'), overrides)
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        with pytest.raises(train.Preempted):
            train.train(config, folder, stop_at=2)
    return folder


def test_commands_take_the_best_step(kept, tmp_path, capsys):
    loss = {m['step']: m['test/loss'] for m in run_folder.read_metrics(kept) if 'test/loss' in m}
    step = max(loss, key=loss.get)  # so it was asked for
    assert main(['evaluate', '--workdir', str(kept), '--step', 'best', '--json']) == 0
    said = json.loads(capsys.readouterr().out)
    assert said['step'] == step
    assert said['test/loss'] == pytest.approx(loss[step], rel=1e-5)
    assert main(['convert', f'{kept}/checkpoints/best', str(tmp_path / 'best.npz')]) == 0
    assert f'step {step}' in capsys.readouterr().out
    assert main(['evaluate', '--workdir', str(kept), '--step', 'bset']) == 2
    assert mentions(capsys.readouterr().err, "'bset'", 'number')


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('checkpoint.keep_best=test/acuracy', "did you mean 'test/accuracy'"),
        ('checkpoint.keep_best=tset/accuracy', "did you mean 'test'"),
        ('checkpoint.keep_best=accuracy', 'evaluation.*metric'),
        ('checkpoint.keep_best=low:test/loss', "unknown direction 'low'"),
        ('early_stop.metric=test/acuracy', "did you mean 'test/accuracy'"),
        ('early_stop.patience=0', 'at least 1'),
        ('early_stop.min_delta=-1', 'early_stop.min_delta=-1'),
    ],
)
def test_what_cannot_be_judged_is_refused_before_training(
    make_config, tmp_path, evaluated, override, message
):
    with pytest.raises(UserError, match=message):
        train.train(make_config(override), tmp_path / 'run')
    assert not evaluated
    assert not (tmp_path / 'run').exists()


def test_a_number_that_only_its_evaluation_knows_is_refused_at_the_first(make_config, evaluated):
    judge = early_stopping.Judge('test/acuracy')
    with pytest.raises(UserError, match=r"keep_best.*'test/acuracy'"):
        judge.after(judge.begin({}), 2, {'test/accuracy': 0.5})
    assert judge.after(judge.begin({}), 2, {'val/accuracy': 0.5}) == judge.begin({})


# --- early stop ---

EARLY = ('early_stop.metric=test/accuracy', 'early_stop.patience=2')


def lines(folder):
    return [m for m in run_folder.read_metrics(folder) if 'test/accuracy' in m]


def test_a_run_that_gets_no_better_ends_and_stays_ended(make_config, tmp_path, evaluated, capsys):
    config = make_config(*EARLY)
    result = train.train(config, tmp_path)
    assert [line['step'] for line in lines(tmp_path)] == [2, 4, 6, 8], 'NaN is no better'
    assert run_folder.steps(tmp_path) == [8]
    why = 'early stop', 'test/accuracy', 'step 4', '0.6000', '2 evaluations'
    assert mentions(capsys.readouterr().out, why)
    stored = (tmp_path / 'result.json').read_text()
    assert mentions(json.loads(stored)['ended'], why)
    assert (
        result.keys() == run_folder.read_result(tmp_path).keys() == {'test/accuracy', 'test/loss'}
    )
    evaluated.clear()
    train.train(config, tmp_path)
    assert not evaluated
    # As after a kill between the last save and the result.
    (tmp_path / 'result.json').unlink()
    train.train(config, tmp_path)
    assert set(evaluated) == {8}
    assert (tmp_path / 'result.json').read_text() == stored
    assert [line['step'] for line in lines(tmp_path)] == [2, 4, 6, 8]


def test_a_run_that_was_at_its_end_anyway_has_not_ended_early(make_config, tmp_path, evaluated):
    train.train(make_config(*EARLY, 'total=8 steps'), tmp_path)
    assert json.loads((tmp_path / 'result.json').read_text()).keys() == {
        'test/accuracy',
        'test/loss',
    }


@pytest.mark.fault(60)
def test_a_folder_that_was_deleted_is_not_made_anew(make_config, tmp_path, evaluated):
    folder = tmp_path / 'run'

    def delete(step, results):
        shutil.rmtree(folder, ignore_errors=True)
        return False

    with pytest.raises(UserError, match=r'deleted.*during'):
        train.train(make_config(), folder, report=delete)
    assert evaluated == [2, 4], 'as far as the next save'
    assert not folder.exists()


@pytest.mark.fault(59)
@pytest.mark.parametrize('stop', [5, 6, pytest.param(7, marks=pytest.mark.long)])
def test_a_resumed_run_ends_where_it_would_have_ended(make_config, tmp_path, evaluated, stop):
    config = make_config(*EARLY)
    with pytest.raises(train.Preempted):
        train.train(config, tmp_path, stop_at=stop)
    (tmp_path / 'metrics.jsonl').unlink()
    train.train(config, tmp_path)
    assert [line['step'] for line in lines(tmp_path)] == [6, 8][stop > 5 :]
    assert 'after step 4' in json.loads((tmp_path / 'result.json').read_text())['ended']


def test_evaluations_that_were_not_due_are_made_in_the_end(make_config, tmp_path, evaluated):
    config = make_config(*EARLY)
    with config.unlocked():
        config.evals.last = {**config.evals.test, 'every': ''}
    assert train.train(config, tmp_path).keys() >= {'test/accuracy', 'last/accuracy'}
    assert ['last/accuracy' in line for line in lines(tmp_path)] == [False, False, False, True]


def test_a_result_has_to_be_better_by_so_much(make_config, tmp_path, evaluated):
    config = make_config(*EARLY, 'early_stop.min_delta=0.5')
    train.train(config, tmp_path)
    assert [line['step'] for line in lines(tmp_path)] == [2, 4, 6]
