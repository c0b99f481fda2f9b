"""`config.branch`: a cooldown from a kept checkpoint of a longer run."""

import pathlib
import shutil

import jax
import pytest
from helpers.digests import tree_digest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.storage.run_folder import read_config, read_metrics
from vit_jax.trainer import branch, train
from vit_jax.trainer.build import build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compiled_once')]


def one_run(config, folder, **options):
    return train.train(config, folder, devices=jax.devices()[:1], **options)


@pytest.fixture(scope='module')
def make_config(repo):
    """A run on digits with dropout and an average, at a schedule without an end."""

    def make(total, cooldown=0, **more):
        config = load.load(str(repo / 'tests/helpers/linear.py'))
        with config.unlocked():
            config.optim.schedule = dict(name='rsqrt', warmup='2 steps', timescale='4 steps')
            config.optim.schedule.cooldown = f'{cooldown} steps'
            config.step.ema_decay, config.step.ema_warmup = 0.9, True
            config.every = dict(log='1', eval='4', checkpoint='2')
            config.checkpoint = dict(keep_last=1, keep_every='4 steps')
        more = {k.replace('__', '.'): v for k, v in more.items()}
        return load.override(config, [f'total={total}', *(f'{k}={v}' for k, v in more.items())])

    return make


@pytest.fixture(scope='module')
def trunk(make_config, tmp_path_factory):
    """Ten steps without a cooldown, of which 4, 8 and 10 are kept."""
    folder = tmp_path_factory.mktemp('trunk') / 'run'
    one_run(make_config(10), folder)
    return folder


def test_a_branch_has_the_classes_of_its_trunk(make_config, trunk, tmp_path):
    """Digits under other numbers are other classes for the head, at the same shapes."""
    config = make_config(8, branch__from=trunk, branch__step=4, data__classes=(1, 0, *range(2, 10)))
    with pytest.raises(UserError, match=r"config.branch: class 0 is '1', .* '0'"):
        one_run(config, tmp_path / 'run')


def saved(folder):
    step, variables, _ = checkpointer.load_variables(folder / 'checkpoints')
    return step, tree_digest(variables)


def without_times(folder):
    timed = ('sec', 'mfu', 'input_bound', 'lock_bound', 'memory')
    return [
        {k: v for k, v in line.items() if not any(word in k for word in timed)}
        for line in read_metrics(folder)
    ]


def test_a_branch_is_the_run_that_had_its_cooldown_from_the_start(make_config, trunk, tmp_path):
    before = saved(trunk)
    whole, branched = tmp_path / 'whole', tmp_path / 'branch'
    expected = one_run(make_config(7, cooldown=3), whole)
    config = make_config(7, cooldown=3, branch__from=trunk, branch__step=4)
    assert one_run(config, branched) == expected
    assert saved(branched) == saved(whole)
    assert without_times(branched) == without_times(whole)
    assert saved(trunk) == before


@pytest.mark.long
def test_a_branch_resumes_from_its_own_checkpoint(make_config, trunk, tmp_path):
    copy = shutil.copytree(trunk, tmp_path / 'copy')
    config = make_config(9, cooldown=5, branch__from=copy, branch__step=4)
    one_run(config, tmp_path / 'whole')
    with pytest.raises(train.Preempted):
        one_run(config, tmp_path / 'stopped', stop_at=6)
    shutil.rmtree(copy)  # it is not needed any more
    one_run(config, tmp_path / 'stopped')
    assert saved(tmp_path / 'stopped') == saved(tmp_path / 'whole')
    assert without_times(tmp_path / 'stopped') == without_times(tmp_path / 'whole')


def test_what_is_not_as_in_the_trunk_is_said(make_config, trunk, tmp_path, capsys):
    config = make_config(5, branch__from=trunk, branch__step=4, optim__lr=1e-3, seed=1)
    one_run(config, tmp_path / 'branch')
    said = capsys.readouterr().out
    assert f'branches off {trunk} after step 4' in said
    assert 'note: config.seed ' in said
    assert 'note: config.optim ' in said
    assert mentions(said, 'note:', 'step 2', '0.0005') and ' 0.0015' in said
    assert 'config.model' not in said


def test_another_schedule_between_the_step_and_the_cooldown_is_said(make_config, trunk):
    one = jax.devices()[:1]
    before = load.from_dict(read_config(trunk))
    assert branch.changes(before, build(make_config(10, cooldown=2), one), ()) == []
    constant, stair = make_config(10), make_config(10)
    with constant.unlocked(), stair.unlocked():
        constant.optim.schedule = dict(name='constant', warmup='2 steps')
        stair.optim.schedule = dict(name='stair', warmup='2 steps', boundaries=('6 steps',))
    (line,) = branch.changes(before, build(constant, one), ())
    assert "--config.optim.schedule.name=rsqrt --config.optim.schedule.timescale='4 steps'" in line
    (line,) = branch.changes(build(constant, one).config, build(stair, one), ())
    assert 'step 7 ' in line and ' 0.003' in line and ' 0.0003' in line
    assert '--config.optim.schedule.name=constant' in line


def mistakes(trunk):  # message: fields of the config
    return {
        'config.branch.step=4: the run ends at step 4': dict(total=4, branch__from=trunk),
        'config.json': dict(total=9, branch__from=trunk / 'nowhere'),
        r'finished steps: \[4, 8, 10\]': dict(total=9, branch__from=trunk, branch__step=6),
        'head/bias': dict(total=9, branch__from=trunk, model__bias=False),
        'name the kept step': dict(total=9, branch__from=trunk, branch__step=0),
        'step 8, .*step 10': dict(total=12, branch__from=f'{trunk}@8', branch__step=10),
        'no best step': dict(total=12, branch__from=f'{trunk}@best', branch__step=0),
        'not both': dict(total=9, branch__from=trunk, init__from=trunk),
        "did you mean 'step'": dict(total=9, branch__stap=4),
    }


@pytest.mark.parametrize('message', mistakes(pathlib.Path()))
def test_a_mistake_is_one_line_and_leaves_nothing(make_config, trunk, tmp_path, message):
    fields = {'branch__step': 4, **mistakes(trunk)[message]}
    with pytest.raises(UserError, match=message) as error:
        one_run(make_config(**fields), tmp_path / 'branch')
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'branch').exists()


@pytest.mark.usefixtures('one_device')
def test_by_the_command(repo, make_config, trunk, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(repo)
    flags = [f'--config.branch.from={trunk}@8', '--config.total=9']
    words = ['train', '--config', 'tests/helpers/linear.py', *flags]
    assert main([*words, '--workdir', str(tmp_path / 'a')]) == 0
    assert f'branches off {trunk} after step 8' in capsys.readouterr().out
