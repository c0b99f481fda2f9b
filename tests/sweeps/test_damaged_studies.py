"""A study that is cut off while it is made, or holds what nobody wrote: made again, or one line."""

import json

import optuna
import pytest
from helpers.messages import mentions
from helpers.studies import ids, make
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.storage import lock
from vit_jax.sweeps import worker
from vit_jax.sweeps.space import grid

POINTS = grid({'seed': [1, 2]})
FILE = (
    'from vit_jax.sweeps.space import Sweep\n'
    'def get_sweep(arg=None):\n'
    "    points = [{'seed': 1}]\n"
    "    return Sweep('experiments/vit/digits.py:smoke', 'test/accuracy', points=points)\n"
)


class Killed(BaseException):
    """The end of the process."""


def sweep(action, folder, *flags, study='name'):
    words = [str(folder.parent / 'sweep.py'), '--study', study] if action == 'create' else [study]
    return main(['sweep', action, *words, '--workdir', str(folder), *flags])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'sweep.py').write_text(FILE)
    return tmp_path / 'runs'


def the_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.fault(77)
@pytest.mark.parametrize(
    ('storage', 'last'),
    [
        ('journal', 'folder'),
        ('journal', 'token'),
        ('sqlite', 'folder'),
        pytest.param('sqlite', 'token', marks=pytest.mark.long),
    ],
)
def test_a_creation_that_is_killed_is_made_again(folder, monkeypatch, capsys, storage, last):
    flags = ['--storage', f'sqlite:///{folder}/sweep.db'] if storage == 'sqlite' else []
    store = optuna.study.Study.set_user_attr

    def killed(study, name, value):
        if name == last:
            raise Killed
        store(study, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.study.Study, 'set_user_attr', killed)
        with pytest.raises(Killed):
            sweep('create', folder, *flags)
    assert sweep('work', folder) == 2
    why = {'folder': "unknown study 'name'", 'token': "the study 'name' was not"}
    assert why[last] in the_line(capsys)
    assert sweep('create', folder, *flags) == 0
    assert sweep('status', folder) == 0
    assert 'waiting 1' in capsys.readouterr().out


@pytest.mark.fault(77)
def test_a_folder_holds_the_runs_of_one_study(folder, capsys):
    assert sweep('create', folder) == 0
    marker = (folder / 'sweep.json').read_text()
    assert sweep('create', folder, study='other') == 2
    assert mentions(the_line(capsys), 'study', "'name'")
    assert sweep('create', folder, '--storage', f'sqlite:///{folder}/sweep.db') == 2
    assert 'choose another --workdir' in the_line(capsys)
    assert (folder / 'sweep.json').read_text() == marker
    assert not (folder / 'sweep.db').exists()


@pytest.mark.fault(78)
@pytest.mark.parametrize('marker', ['{', '[]', '{"study": 5, "storage": [1]}'])
def test_a_damaged_marker_is_one_line(tmp_path, capsys, marker):
    make(tmp_path, points=POINTS)
    (tmp_path / 'sweep.json').write_text(marker)
    assert sweep('status', tmp_path) == 2
    assert 'sweep.json' in (line := the_line(capsys)) or 'cannot be opened' in line


@pytest.mark.fault(78)
@pytest.mark.parametrize(('name', 'value'), [('run', '../0'), ('folder', 5), ('attempt', [0])])
@pytest.mark.parametrize('action', ['work', 'status', 'retry', 'best', 'plot'])
def test_attributes_that_no_worker_wrote_are_one_line(tmp_path, capsys, action, name, value):
    made = make(tmp_path, points=POINTS)
    made.storage.set_trial_user_attr(ids(made, 1)[1], name, value)
    assert sweep(action, tmp_path) == 2
    assert f'trial 2 has an impossible {name}' in the_line(capsys)


@pytest.mark.fault(78)
@pytest.mark.parametrize('change', [{'step': None}, {'step': 'x'}])
def test_a_journal_of_impossible_steps_is_one_line(tmp_path, fake_training, capsys, change):
    make(tmp_path, points=POINTS)
    fake_training(lambda config, step: 1.0)
    assert sweep('work', tmp_path) == 0
    file = tmp_path / 'journal.log'
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (first, *_) = [line for line in lines if 'intermediate_value' in line]
    first.update(change)
    file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    capsys.readouterr()
    assert sweep('status', tmp_path) == 2
    assert mentions(the_line(capsys), '1', 'impossible')


@pytest.mark.fault(78)
@pytest.mark.parametrize(('name', 'value'), [('run', '../0'), ('attempt', [0])])
def test_what_is_tampered_with_after_a_worker_has_begun_is_one_line(
    tmp_path, fake_training, capsys, name, value
):
    made = make(tmp_path, points=POINTS)

    def tamper(config, step):
        made.storage.set_trial_user_attr(ids(made, 1)[1], name, value)
        return 1.0

    fake_training(tamper)
    assert sweep('work', tmp_path) == 2
    assert mentions(the_line(capsys), 'error:', "study 'name'")
    states = [trial.state for trial in make_again(tmp_path).get_trials()]
    assert states == [TrialState.COMPLETE, TrialState.RUNNING]


@pytest.mark.fault(78)
@pytest.mark.parametrize('content', ['{}', '[]', '{"host": 1}', '{"pid": 99999999999999999999}'])
def test_a_damaged_claim_is_taken_up(tmp_path, fake_training, capsys, content):
    made = make(tmp_path, points=POINTS)
    with worker.claim_trial(made) as trial:
        worker.suggest(made, trial)
    (made.claim_folder(trial.number) / lock.LOCK).write_text(content)
    assert sweep('status', tmp_path) == 0
    assert 'interrupted 1' in capsys.readouterr().out
    fake_training(lambda config, step: 1.0)
    assert sweep('work', tmp_path) == 0
    assert {trial.state for trial in made.trials()} == {TrialState.COMPLETE}


def make_again(folder):
    """The study as Optuna alone reads it."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / 'journal.log'))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name='name', storage=storage)
