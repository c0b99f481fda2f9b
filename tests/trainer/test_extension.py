"""`train --extend`: a run goes on to a later end, as if it had had that end from the start."""

import dataclasses

import pytest
from helpers.digests import tree_digest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.trainer import build, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device', 'compiled_once')]


TRAIN_STEPS = []


@pytest.fixture
def one_train_step(monkeypatch):
    """All programs have the training step of the first, whatever their learning rate."""
    make = build.make_program

    def with_one_step(*arguments):
        program = make(*arguments)
        TRAIN_STEPS[:] = TRAIN_STEPS or [program.train_step]
        return dataclasses.replace(program, train_step=TRAIN_STEPS[0])

    monkeypatch.setattr(build, 'make_program', with_one_step)


@pytest.fixture(scope='module')
def make_config(repo):
    def make(total, **schedule):
        config = load.load(str(repo / 'tests/helpers/linear.py'))
        with config.unlocked():
            config.optim.schedule = dict(name='rsqrt', timescale='4', warmup='2') | schedule
            config.every = dict(log='2', eval='4', checkpoint='2')
        return load.override(config, [f'total={total} steps'])

    return make


def saved(folder):
    step, variables, _ = checkpointer.load_variables(folder / 'checkpoints')
    return step, tree_digest(variables)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_an_extended_run_is_the_one_that_was_longer_from_the_start(make_config, tmp_path, capsys):
    expected = train.train(make_config(8), tmp_path / 'whole')
    folder = tmp_path / 'extended'
    train.train(make_config(4), folder)
    with pytest.raises(train.Preempted):
        train.train(make_config(8), folder, extend=True, stop_at=6)
    assert mentions(capsys.readouterr().out, '4', '8 steps')
    assert not (folder / 'result.json').exists()
    # It has its new length from here on, whether or not that is said again.
    assert train.train(make_config(8), folder) == expected
    assert train.train(make_config(8), folder, extend=True) == expected
    assert saved(folder) == saved(tmp_path / 'whole')


@pytest.mark.parametrize(
    ('schedule', 'total', 'message'),
    [
        ({'warmup': '50%'}, 8, r'step 2 .*0\.0015.*0\.00075'),
        pytest.param({'cooldown': '2'}, 8, 'step 4 .*', marks=pytest.mark.long),
        ({'name': 'cosine'}, 8, r'step 4 .*0\.0015'),
        ({}, 3, r"config\.total='3 steps'.* 4"),
    ],
)
@pytest.mark.usefixtures('one_train_step')  # what is refused hangs on configs alone
def test_what_cannot_go_on_stays_as_it_is(make_config, tmp_path, schedule, total, message):
    train.train(make_config(4, **schedule), tmp_path / 'run')
    before = files(tmp_path / 'run')
    with pytest.raises(UserError, match=message):
        train.train(make_config(total, **schedule), tmp_path / 'run', extend=True)
    assert files(tmp_path / 'run') == before
    with pytest.raises(UserError, match='--workdir') as error:
        train.train(make_config(total, **schedule), tmp_path / 'run')
    assert ('--extend' in str(error.value)) == (not schedule)  # it is offered where it may work


def test_by_the_command(repo, tmp_path, capsys):
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py']
    words += ['--config.optim.schedule.name=constant', '--config.optim.schedule.warmup=']
    words += ['--workdir', str(tmp_path / 'run')]
    assert main([*words, '--config.total=4 steps']) == 0
    assert main([*words, '--config.total=6 steps', '--extend']) == 0
    assert mentions(capsys.readouterr().out, '4', '6 steps')
    assert main([*words, '--config.total=8 steps', '--extend', '--config.optim.lr=1e-4']) == 2
    error = capsys.readouterr().err
    assert error.endswith('(config.total, config.optim differs): choose another --workdir\n')
