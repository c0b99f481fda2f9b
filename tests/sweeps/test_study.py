"""Studies without training: every trial exactly once, claims, pruning, what is shown."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip('optuna')

from optuna.trial import TrialState

from vit_jax import manifest, train, workdir
from vit_jax.__main__ import main
from vit_jax.commands import sweep as command
from vit_jax.errors import UserError
from vit_jax.meter import Diverged
from vit_jax.sweeps import claims, report, study, worker
from vit_jax.sweeps.space import Sweep, choice, grid, log_uniform, uniform

METRIC = 'test/accuracy'
STORAGES = ('journal', 'sqlite')


@pytest.fixture(autouse=True)
def at_the_root(repo, monkeypatch):
    monkeypatch.chdir(repo)


def make(folder, storage='journal', **fields):
    url = {'journal': '', 'sqlite': f'sqlite:///{folder}/sweep.db'}[storage]
    sweep = Sweep(config='experiments/vit/digits.py:smoke', metric=METRIC, **fields)
    return study.create(sweep, 'name', url, folder)


@pytest.fixture
def fake_training(monkeypatch):
    """`fake_training(f)`: a run's metric is f(config, step) at the steps 1, 2, 3."""

    def install(f):
        def run(config, folder, report, **_):
            for step in (1, 2, 3):
                results = {METRIC: f(config, step)}
                if report(step, results) and step < 3:
                    raise train.Pruned
            return results

        monkeypatch.setattr(train, 'train', run)

    return install


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


WORKER = """
import sys
from vit_jax import train
from vit_jax.sweeps import study, worker

def run(config, folder, report, **_):
    with open(sys.argv[2], 'a') as file:
        file.write(f'{config.seed} {config.optim.lr}\\n')
    return {'test/accuracy': config.optim.lr}

train.train = run
worker.work(study.open_study('name', folder=sys.argv[1]))
"""


@pytest.mark.parametrize('storage', STORAGES)
def test_two_workers_run_each_point_of_a_grid_exactly_once(tmp_path, repo, storage):
    values = {'seed': [0, 1, 2], 'optim.lr': [0.1, 0.2]}
    made = make(tmp_path, storage, points=grid(values))
    words = [sys.executable, '-c', WORKER, str(tmp_path)]
    logs = [tmp_path / f'{i}.txt' for i in (0, 1)]
    workers = [subprocess.Popen([*words, str(log)], cwd=repo) for log in logs]
    assert [process.wait() for process in workers] == [0, 0]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    assert Counter(lines) == {f'{seed} {lr}': 1 for seed in range(3) for lr in (0.1, 0.2)}
    assert report.counts(made) | {'complete': 6} == report.counts(made)
    assert len(made.trials()) == 6


@pytest.mark.parametrize('storage', STORAGES)
def test_a_trial_that_lost_its_worker_is_taken_up_by_another(tmp_path, storage, fake_training):
    make(tmp_path, storage, space={'optim.lr': log_uniform(1e-4, 1e-1)}, trials=2)
    first = study.open_study('name', folder=tmp_path)
    with claims.claimed(first) as trial:
        point = worker.suggest(first, trial)
        trial.report(0.25, 1)
        second = study.open_study('name', folder=tmp_path)
        with claims.claimed(second) as other:
            assert (trial.number, other.number) == (0, 1)
    # Both ended without a word to the study.
    fake_training(lambda config, step: 0.25 * step)
    second = study.open_study('name', folder=tmp_path)
    assert worker.work(second).finished == 2
    frozen = second.trials()[0]
    assert (frozen.state, frozen.params, frozen.value) == (TrialState.COMPLETE, point, 0.75)
    assert frozen.intermediate_values == {1: 0.25, 2: 0.5, 3: 0.75}


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
        assert report.rows(made)[0][:2] == ['0', 'interrupted']
    assert worker.work(made).finished == 1
    assert [row[1] for row in report.rows(made)] == ['fail', 'complete']
    reason = 'trial 0 failed: its worker died 3 times after step 0'
    assert report.notes(made) == [reason]


def test_a_trial_that_gets_further_each_time_is_not_given_up(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0]}), retries=0)
    monkeypatch.setattr(manifest, 'steps', lambda root: saved)
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
    tally = report.counts(made)
    assert (tally['running'], tally['interrupted']) == (0, 1)


def test_status_names_the_worker_and_the_time_that_is_left(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'seed': [0, 1, 2, 3]}))
    fake_training(lambda config, step: 0.5)
    worker.work(made, 1)
    assert report.notes(made) == []
    with claims.claimed(made) as trial:
        owner = f'running on {socket.gethostname()}:{os.getpid()}'
        assert report.rows(made)[1][:2] == [str(trial.number), owner]
        (line,) = report.notes(made)
        assert re.fullmatch(r'about 0:00:\d\d left: 3 trials of 0:00:\d\d .*workers: 1', line)
    assert report.rows(made)[1][1] == 'interrupted'


def test_a_failed_trial_is_queued_again_once_and_goes_on_in_its_folder(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0, 1]}))
    folders = []

    def run(config, folder, report, **_):
        folders.append(folder.name)
        if config.seed == 1 and folders.count('0001') < 3:
            raise UserError('the data are away')
        return {METRIC: 0.5}

    monkeypatch.setattr(train, 'train', run)
    assert study.retry(made) == 0
    worker.work(made)
    for _ in range(2):
        assert study.retry(made) == 1
        assert study.retry(made) == 0
        worker.work(made)
    assert folders == ['0000', '0001', '0001', '0001']
    states = [row[1] for row in report.rows(made)]
    assert states == ['complete', 'fail', 'fail', 'complete']
    assert made.trials()[-1].params == {'seed': 1}


def test_a_stop_between_two_trials_is_heard(tmp_path, monkeypatch):
    made = make(tmp_path, points=grid({'seed': [0, 1]}))

    def run(config, folder, report, **_):
        with workdir.Preemption():
            os.kill(os.getpid(), signal.SIGINT)  # after the last step: too late for this run
        return {METRIC: 0.5}

    monkeypatch.setattr(train, 'train', run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(train.Preempted, match='after trial 0'):
            worker.work(made)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report.counts(made) | {'complete': 1, 'waiting': 1} == report.counts(made)


def test_a_trial_that_ended_before_it_was_claimed_is_left_alone(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'seed': [0]}))
    (waiting,) = made.trials()
    fake_training(lambda config, step: 1.0)
    worker.work(made)
    assert claims.take(made, waiting) is None


@pytest.mark.parametrize('pruner', ['median', 'hyperband'])
def test_the_pruner_ends_runs_that_are_behind(tmp_path, pruner, fake_training):
    options = {
        'median': {'n_startup_trials': 2},
        'hyperband': {'min_resource': 1, 'max_resource': 3},
    }
    seeds = grid({'seed': list(range(12))})
    made = make(tmp_path, points=seeds, pruner=pruner, pruner_options=options[pruner])
    fake_training(lambda config, step: 1 - 0.01 * config.seed)
    assert worker.work(made).failures == []
    counts = report.counts(made)
    assert counts['pruned'] and counts['complete'] and counts['pruned'] + counts['complete'] == 12
    ended = next(t for t in made.trials() if t.state == TrialState.PRUNED)
    assert len(ended.intermediate_values) < 3
    assert report.best(made).params == {'seed': 0}


def test_a_search_takes_the_number_of_trials_and_its_seed(tmp_path, fake_training):
    fake_training(lambda config, step: -abs(math.log10(config.optim.lr) + 2))
    found = []
    for folder, pieces in (('a', (5,)), ('b', (2, 3))):
        dimensions = {
            'optim.lr': log_uniform(1e-4, 1e-1),
            'model.depth': uniform(1, 3),
            'task.mixup': choice(0.0, 0.5),
        }
        made = make(tmp_path / folder, space=dimensions, trials=5, search='random')
        for limit in pieces:
            worker.work(made, limit)
        assert worker.work(made).finished == 0
        found.append([trial.params for trial in made.trials()])
    assert found[0] == found[1]
    assert len({params['optim.lr'] for params in found[0]}) == 5
    assert all(isinstance(params['model.depth'], int) for params in found[0])


def test_tpe_goes_where_it_is_better(tmp_path, fake_training):
    fake_training(lambda config, step: -abs(math.log10(config.optim.lr) + 2))
    made = make(tmp_path, space={'optim.lr': log_uniform(1e-5, 1.0)}, trials=25)
    worker.work(made)
    values = [trial.value for trial in made.trials()]
    assert sum(values[15:]) / 10 > sum(values[:10]) / 10


def test_cmaes_goes_where_it_is_better(tmp_path, fake_training):
    pytest.importorskip('cmaes')

    def height(config, step):
        lr, decay = config.optim.lr, config.optim.weight_decay
        return -abs(math.log10(lr) + 3) - abs(math.log10(decay) + 5)

    fake_training(height)
    dimensions = {'optim.lr': log_uniform(1e-6, 1.0), 'optim.weight_decay': log_uniform(1e-8, 1e-2)}
    made = make(tmp_path, space=dimensions, trials=40, search='cmaes')
    assert worker.work(made).finished == 40
    values = [trial.value for trial in made.trials()]
    assert sum(values[25:]) / 15 > sum(values[:10]) / 10 + 0.5


def test_the_resolved_config_of_every_trial_is_stored(tmp_path, fake_training):
    made = make(tmp_path, points=grid({'optim.lr': [0.5]}), overrides={'seed': 7})
    fake_training(lambda config, step: 1.0)
    worker.work(made)
    (trial,) = study.open_study('name', folder=tmp_path).trials()
    stored = trial.user_attrs['config']
    assert (stored['optim']['lr'], stored['seed'], stored['model']['name']) == (0.5, 7, 'vit')
    assert trial.user_attrs['folder'] == str(tmp_path / '0000')


def test_what_diverges_is_pruned_and_what_cannot_run_fails(tmp_path, monkeypatch, capsys):
    def run(config, folder, report, **_):
        if config.seed == 0:
            raise Diverged('step 3: not finite')
        if config.seed == 1:
            raise UserError('no such data')
        return {METRIC: math.nan if config.seed == 2 else 0.5}

    monkeypatch.setattr(train, 'train', run)
    made = make(tmp_path, points=grid({'seed': [0, 1, 2, 3]}))
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 2
    error = 'error: 1 of 4 trials failed; the first: trial 1: no such data\n'
    assert capsys.readouterr().err == error
    states = [row[1] for row in report.rows(made)]
    assert states == ['diverged', 'fail', 'diverged', 'complete']


# --- what is shown ---


@pytest.fixture
def finished(tmp_path, fake_training):
    points = grid({'optim.lr': [0.001, 0.01], 'seed': [0, 1]})
    make(tmp_path, points=points, overrides={'batch_size': 16})
    fake_training(lambda config, step: 10 * config.optim.lr + 0.01 * (config.seed + step))
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    return tmp_path


def test_status_best_and_plot(finished, capsys):
    capsys.readouterr()
    assert main(['sweep', 'status', 'name', '--workdir', str(finished)]) == 0
    output = capsys.readouterr().out
    assert 'complete 4' in output
    assert re.search(r'^ +3  complete +3 +0\.1400 +0\.01 +1\s*$', output, re.MULTILINE)

    assert main(['sweep', 'best', 'name', '--workdir', str(finished)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f'trial 3: {METRIC} 0.1400\n  optim.lr = 0.01\n  seed = 1\n')
    flags = '--config.batch_size=16 --config.optim.lr=0.01 --config.seed=1'
    place = f'--workdir {finished}-0003'
    assert f'--config experiments/vit/digits.py:smoke {flags} {place}\n' in output

    assert main(['sweep', 'plot', 'name', '--workdir', str(finished)]) == 0
    assert (finished / 'sweep.png').read_bytes().startswith(b'\x89PNG')
    svg = finished / 'other.svg'
    assert main(['sweep', 'plot', 'name', '--workdir', str(finished), '--output', str(svg)]) == 0
    assert all(word in svg.read_text() for word in ('optim.lr', 'Evaluations', 'complete'))


def test_nothing_to_show_yet(tmp_path, capsys):
    make(tmp_path, points=grid({'seed': [0]}))
    for action in ('best', 'plot'):
        assert main(['sweep', action, 'name', '--workdir', str(tmp_path)]) == 2
        assert "no trial of the study 'name'" in capsys.readouterr().err


def test_help_lists_every_action_and_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(['sweep', '--help'])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert all(f'vit_jax sweep {name}' in output for name in command.ACTIONS)
    assert all(flag in output for flag in ('--study', '--storage', '--trials', '--coordinator'))


# --- mistakes ---


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([], 'say what to do: create, work'),
        (['crate'], "did you mean 'create'"),
        (['create', 'none.py', '--study', 'a'], 'no file'),
        (['create', 'experiments/sweeps/digits.py'], '--study'),
        (['work', 'none'], "unknown study 'none'"),
        (['work', 'a', '--storage', 'sqlite:////none/a.db'], 'no such file'),
        (['work', 'a', '--storage', 'postgres'], 'cannot be opened'),
        (['status', 'a', '--study', 'b'], "unknown flag '--study'"),
        (['work', 'a', '--trials', '0'], 'at least 1'),
        (['plot', 'a', '--output', 'a.doc'], 'must end in'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(['sweep', *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count('\n') == 1


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'points': [{'optim.lrr': 0.1}]}, "did you mean 'lr'"),
        ({'points': [{'batch_size': 'x'}]}, 'expected int'),
        ({'space': {'batch_size': uniform(0, 4)}, 'trials': 2}, 'at least 1'),
        ({'points': [{'seed': 1}], 'overrides': {'no': 1}}, "unknown key of config 'no'"),
        ({'points': [{'seed': 1}], 'pruner_options': {'x': 1}}, 'pruner_options'),
    ],
)
def test_what_no_trial_could_run_is_refused_at_once(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path / 'study', **fields)
    assert not (tmp_path / 'study').exists()


def test_the_metric_has_to_be_evaluated(tmp_path):
    sweep = Sweep(config='experiments/vit/digits.py', metric='val/loss', points=[{'seed': 0}])
    with pytest.raises(UserError, match=r'unknown evaluation .val. .valid: test'):
        study.create(sweep, 'name', folder=tmp_path)


def test_a_study_is_created_once(tmp_path):
    make(tmp_path, points=[{'seed': 0}])
    with pytest.raises(UserError, match="'name' exists"):
        make(tmp_path, points=[{'seed': 0}])


def test_a_creation_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(study.space, 'to_json', lambda sweep: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(tmp_path, points=[{'seed': 0}])
    with pytest.raises(UserError, match='not created to its end'):
        study.open_study('name', f'journal:{tmp_path}/journal.log', tmp_path)
    assert len(make(tmp_path, points=[{'seed': 0}]).trials()) == 1


def test_workers_need_the_folder_of_the_study(tmp_path):
    url = f'sqlite:///{tmp_path}/a.db'
    sweep = Sweep(config='experiments/vit/digits.py', metric=METRIC, points=[{'seed': 0}])
    made = study.create(sweep, 'name', url, tmp_path / 'here')
    study.require_shared_folder(study.open_study('name', url))
    (tmp_path / 'here').rename(tmp_path / 'there')
    with pytest.raises(UserError, match='all workers share one'):
        study.require_shared_folder(study.open_study('name', url))
    moved = study.open_study('name', url, tmp_path / 'there')
    study.require_shared_folder(moved)
    assert moved.run_folder(0) == tmp_path / 'there' / '0000'
    assert made.sweep.metric == moved.sweep.metric


def test_a_password_is_not_written_down(tmp_path):
    url = study.without_password('postgresql+psycopg://me:secret@host/base')
    assert url == 'postgresql+psycopg://me@host/base'


def test_without_cmaes_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(study.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'vit_jax\[sweep\]'"):
        study.make_sampler('cmaes', 0)


def test_without_optuna_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command, 'PACKAGES', ('no_such_package',))
    assert main(['sweep', 'status', 'a']) == 2
    assert "pip install 'vit_jax[sweep]'" in capsys.readouterr().err


def test_the_marker_names_study_and_storage(tmp_path):
    make(tmp_path, points=[{'seed': 0}])
    marker = json.loads((tmp_path / 'sweep.json').read_text())
    assert marker['study'] == 'name'
    assert marker['storage'] == f'journal:{tmp_path}/journal.log'
