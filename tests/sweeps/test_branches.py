"""Branches of a sweep: they start from the run of another trial, once it has got there."""

import pytest
from helpers.messages import mentions, says

pytest.importorskip('optuna')

from helpers.digests import tree_digest
from helpers.studies import make
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.errors import UserError
from vit_jax.storage import run_folder
from vit_jax.sweeps import asha, picture, study, worker
from vit_jax.sweeps.cooldowns import cooldowns
from vit_jax.sweeps.space import Sweep, grid
from vit_jax.trainer import train

CONFIG = 'tests/helpers/linear.py'
TRUNK = {
    'total': '8 steps',
    'optim.schedule.cooldown': '0 steps',
    'checkpoint.keep_steps': '(4,)',
    'branch.from': '',
    'branch.step': 0,
}
BRANCH = {
    'total': '6 steps',
    'optim.schedule.cooldown': '2 steps',
    'checkpoint.keep_steps': '()',
    'branch.from': 'trial:0',
    'branch.step': 4,
}
COMMON = {
    'optim.schedule.name': 'constant',
    'optim.schedule.warmup': '2 steps',
    'every.eval': '100%',
    'every.checkpoint': '',
    'checkpoint.keep_last': 1,
}


@pytest.mark.slow
def test_a_branch_is_a_run_of_its_length_cooled_down(tmp_path, one_device):
    trunk, branch = cooldowns([{'seed': 0}], (6, 8), cooldown=1 / 3)
    assert branch == BRANCH | {'seed': 0}
    alone = branch | {'branch.from': '', 'branch.step': 0}
    sweep = Sweep(CONFIG, 'test/accuracy', points=[trunk, branch, alone], overrides=COMMON)
    study.create(sweep, 'name', folder=tmp_path)
    made = study.open_study('name', folder=tmp_path, allowed=['helpers'])
    assert worker.work(made).failures == []
    assert run_folder.steps(made.run_folder(0)) == [4, 8]
    stored = run_folder.read_config(made.run_folder(1))
    assert stored['branch'] == {'from': str(made.run_folder(0)), 'step': 4}
    digests = [
        tree_digest(checkpointer.load_variables(made.run_folder(n) / 'checkpoints')[1])
        for n in (1, 2)
    ]
    assert digests[0] == digests[1]
    assert f'--config.branch.from={made.run_folder(0)}' in picture.command(made, made.trials()[1])


def test_each_point_has_one_trunk_and_a_branch_for_each_shorter_length():
    points = cooldowns(grid({'optim.lr': [0.1, 0.2]}), (100, 200, 400))
    assert [point['optim.lr'] for point in points] == [0.1, 0.2, 0.1, 0.1, 0.2, 0.2]
    assert [point['total'] for point in points[2:]] == ['100 steps', '200 steps'] * 2
    assert {point['checkpoint.keep_steps'] for point in points[:2]} == {'(80, 160)'}
    assert [asha.trunk_of(point) for point in points] == [None, None, 0, 0, 1, 1]
    asha.require_trunks(Sweep(CONFIG, 'test/accuracy', points=points))


@pytest.mark.parametrize(
    ('lengths', 'cooldown', 'point', 'message'),
    [
        ((4, 2), 0.2, {}, 'rise'),
        ((1, 8), 0.2, {}, 'no step is left'),
        ((4, 8), 1.0, {}, 'cooldown=1.0'),
        ((4, 8), 0.2, {'total': '9 steps'}, 'total'),
    ],
)
def test_lengths_that_cannot_be_cooled_down(lengths, cooldown, point, message):
    with pytest.raises(UserError, match=message):
        cooldowns([point], lengths, cooldown)


@pytest.fixture
def kept(monkeypatch):
    """The kept steps of each run folder, by its name."""
    found: dict[str, list[int]] = {}
    monkeypatch.setattr(run_folder, 'steps', lambda folder: found.get(folder.name, []))
    return found


def numbers(made):
    return [frozen.number for frozen in worker.claimable(made)]


def test_a_branch_is_claimed_once_its_trunk_has_kept_the_step(tmp_path, kept):
    made = make(tmp_path, points=[TRUNK, BRANCH])
    assert numbers(made) == [0]
    with worker.claim_trial(made) as trial:
        worker.suggest(made, trial)
        assert numbers(made) == [0]
        assert worker.more_to_come(made)
        kept['0001'] = [4]
        assert numbers(made) == [0, 1]
    # Its worker died: another one takes up the trunk, which has to reach what other branches need.
    assert numbers(made) == [0, 1]


def test_a_worker_waits_for_the_trunk_of_another(
    tmp_path, kept, monkeypatch, fake_training, capsys
):
    made = make(tmp_path, points=[TRUNK, BRANCH])
    fake_training(lambda config, step: config.branch.step)
    with worker.claim_trial(made) as trial:
        worker.suggest(made, trial)
        monkeypatch.setattr(worker.time, 'sleep', lambda seconds: kept.update({'0001': [4]}))
        assert worker.work(study.open_study('name', folder=tmp_path)).finished == 1
    assert capsys.readouterr().out.count('other workers') == 1
    assert [t.state for t in made.trials()] == [TrialState.RUNNING, TrialState.COMPLETE]


@pytest.mark.slow
@pytest.mark.parametrize(('cooldown', 'best'), [('0 steps', 1), ('2 steps', 0)])
def test_a_trunk_that_has_not_cooled_down_is_not_the_best(
    tmp_path, kept, fake_training, capsys, cooldown, best
):
    kept['0001'] = [4]
    trunk = TRUNK | {'optim.schedule.cooldown': cooldown}
    made = make(tmp_path, points=[trunk, BRANCH], overrides=COMMON)
    fake_training(lambda config, step: 0.5 if config.branch.step else 0.9)
    worker.work(made, limit=1)
    if best:
        assert main(['sweep', 'best', 'name', '--workdir', str(tmp_path)]) == 2
        assert mentions(capsys.readouterr().err, 'trunks', 'complete')
    worker.work(made)
    assert picture.best(made).number == best
    assert picture.plot(made, tmp_path / 'sweep.png').exists()


def test_a_branch_of_a_failed_trunk_fails_and_both_are_queued_again(tmp_path, kept, monkeypatch):
    def run(config, folder, **_):
        raise UserError('no kept step' if config.branch.step else 'no data')

    monkeypatch.setattr(train, 'train', run)
    made = make(tmp_path, points=[TRUNK, BRANCH])
    done = worker.work(made)
    first, second = done.failures
    assert says(first, 'trial 1', 'no data') and says(second, 'trial 2', 'no kept step')
    assert study.retry(made) == 2
    assert numbers(made) == [2]
    kept['0001'] = [4]
    assert numbers(made) == [2, 3]


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'branch.from': 'trial:1'}, 'branch.*trunk'),
        ({'branch.from': 'trial:-1'}, 'branch.*trunk'),
        ({'branch.step': 0}, 'give branch.step'),
    ],
)
def test_a_branch_without_a_trunk_is_refused(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path / 'study', points=[TRUNK, BRANCH | change])
    assert not (tmp_path / 'study').exists()


def test_a_folder_is_left_as_it_is(tmp_path):
    made = make(tmp_path, points=[TRUNK, BRANCH])
    assert asha.resolve_trunk({'branch.from': '/runs/a'}, made.run_folder) == {
        'branch.from': '/runs/a'
    }
    assert asha.resolve_trunk(BRANCH, made.run_folder)['branch.from'] == str(tmp_path / '0001')
