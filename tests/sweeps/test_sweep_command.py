"""What the actions of `sweep` show of a study, and what they say of mistakes."""

import re
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

pytest.importorskip('optuna')

from helpers.messages import mentions, says
from helpers.studies import METRIC, make

from vit_jax.__main__ import main
from vit_jax.commands import sweep as command
from vit_jax.sweeps import picture, space
from vit_jax.sweeps.space import Sweep, grid


@pytest.fixture
def finished(tmp_path, fake_training):
    points = grid({'optim.lr': [0.001, 0.01], 'seed': [0, 1]})
    make(tmp_path, points=points, overrides={'batch_size': 16})
    fake_training(lambda config, step: 10 * config.optim.lr + 0.01 * (config.seed + step))
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    return tmp_path


@pytest.mark.slow
def test_status_best_and_plot(finished, capsys):
    capsys.readouterr()
    assert main(['sweep', 'status', 'name', '--workdir', str(finished)]) == 0
    output = capsys.readouterr().out
    assert 'complete 4' in output
    assert re.search(r'^ +4  complete +3 +0\.1400 +0\.01 +1\s*$', output, re.MULTILINE)

    assert main(['sweep', 'best', 'name', '--workdir', str(finished)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        f'{METRIC} 0.1350 [0.1204, 0.1496], mean of 2 seeds: trials 4, 3\n'
        'trial 4, its best: 0.1400\n  optim.lr = 0.01\n  seed = 1\n'
        'next: 0.0450 [0.0304, 0.0596], mean of 2 seeds: trials 2, 1\n'
    )
    flags = '--config.batch_size=16 --config.optim.lr=0.01 --config.seed=1'
    place = f'--workdir {finished}-0004'
    assert f'--config experiments/vit/digits.py:smoke {flags} {place}\n' in output

    assert main(['sweep', 'plot', 'name', '--workdir', str(finished)]) == 0
    assert (finished / 'sweep.png').read_bytes().startswith(b'\x89PNG')
    svg = finished / 'other.svg'
    assert main(['sweep', 'plot', 'name', '--workdir', str(finished), '--output', str(svg)]) == 0
    drawn = svg.read_text()
    assert all(word in drawn for word in ('Learning rate', 'Seed', 'Evaluations', '4 complete'))
    assert '-- jittered' in drawn  # two trials have one value
    assert '-- best' in drawn and '-- pruned' not in drawn  # the legend has what there is


def test_one_value_of_one_dimension_is_a_curve(tmp_path, fake_training):
    study = make(tmp_path, points=grid({'seed': [3, 1, 2]}))
    fake_training(lambda config, step: 0.1 * config.seed, steps=[3])
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    (panel,) = picture.draw(study, study.trials(*picture.ENDED)).axes
    assert panel.get_title(loc='left') == 'Seed'
    (curve,) = (line for line in panel.lines if len(line.get_xdata()) == 3)
    np.testing.assert_allclose(curve.get_ydata(), [0.1, 0.2, 0.3])
    assert panel.get_xlabel() == ''


def test_jittered_points_surround_their_value():
    axes = Figure().add_subplot()
    places = picture.positions(axes, space.Choice((0.1, 0.3)), [0.3, 0.1, 0.3, 0.1, 0.3])
    np.testing.assert_allclose(places, [0.8, -0.15, 1.0, 0.15, 1.2])
    assert axes.get_xlabel() == 'jittered'


def test_curves_over_a_dimension_mark_the_best_mean(tmp_path, fake_training, capsys):
    grown = grid({'optim.lr': [0.1, 0.01, 1.0], 'batch_size': [4, 8], 'seed': [0, 1]})
    study = make(tmp_path, points=grown)
    fake_training(lambda config, step: config.optim.lr * config.batch_size + config.seed)
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    found = picture.read_curves(study, picture.Dimensions('optim.lr', 'batch_size'))
    assert found == {
        None: {
            size: {lr: pytest.approx([lr * size, lr * size + 1]) for lr in (0.01, 0.1, 1.0)}
            for size in (4, 8)
        }
    }
    svg = tmp_path / 'curves.svg'
    flags = ['name', '--workdir', str(tmp_path), '--output', str(svg)]
    by = ['--by', 'batch_size', '--panel', 'seed']
    assert main(['sweep', 'plot', *flags, '--x', 'optim.lr', *by]) == 0
    assert 'Batch size 8, best at 1' in svg.read_text()
    for wrong, message in (
        (['--x', 'optim.lrr'], "did you mean 'optim.lr'"),
        (['--x', 'seed'], ('positive', 'number')),
        (['--by', 'seed'], 'need --x'),
    ):
        assert main(['sweep', 'plot', *flags, *wrong]) == 2
        assert mentions(capsys.readouterr().err, message)


def test_the_best_setting_is_not_that_of_the_luckiest_seed(tmp_path, fake_training):
    """One seed of 0.2 leads; the three of 0.1 are better by more than the noise between seeds."""
    points = [*grid({'optim.lr': [0.1], 'seed': [0, 1, 2]}), {'optim.lr': 0.2, 'seed': 0}]
    study = make(tmp_path, points=points)
    fake_training(lambda config, step: 0.9 + 0.02 * config.seed if config.optim.lr == 0.1 else 0.93)
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    first, second = picture.settings(study)
    assert first.mean == pytest.approx(0.92) and [t.number for t in first.trials] == [2, 1, 0]
    assert second.mean - second.half < first.mean - first.half < second.mean
    assert second.half == pytest.approx(first.half * 3**0.5)
    assert picture.best(study).number == 2
    (panel,) = picture._draw_curves(
        study,
        picture.Dimensions('optim.lr'),
        picture.read_curves(study, picture.Dimensions('optim.lr')),
    ).axes
    (bars,) = panel.containers
    assert bars.has_yerr and len(bars[2][0].get_segments()) == 1


def test_nothing_to_show_yet(tmp_path, capsys):
    make(tmp_path, points=grid({'seed': [0]}))
    for action in ('best', 'plot'):
        assert main(['sweep', action, 'name', '--workdir', str(tmp_path)]) == 2
        assert mentions(capsys.readouterr().err, 'trial', "'name'")


def test_a_driver_that_does_not_say_what_it_lacks(tmp_path, monkeypatch, capsys):
    (tmp_path / 'psycopg.py').write_text("raise ImportError('no pq wrapper available')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'psycopg', raising=False)
    storage = ['--storage', 'postgresql+psycopg://host/studies']
    assert main(['sweep', 'status', 'name', *storage]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'error:', '--storage') and 'pip install' in line


def test_help_lists_every_action_and_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(['sweep', '--help'])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert all(f'vit_jax sweep {name}' in output for name in command.ACTIONS)
    assert all(flag in output for flag in ('--study', '--storage', '--trials', '--coordinator'))


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([], ('create', 'work')),
        (['crate'], "did you mean 'create'"),
        (['create', 'none.py', '--study', 'a'], 'no file'),
        (['create', 'experiments/sweeps/digits.py'], '--study'),
        (['create', 'experiments/sweeps/digits.py', '--study', ''], "--study '': give a name"),
        (['create', 'experiments/sweeps/digits.py', '--study', '../a'], 'a name without /'),
        (['work', 'none'], "unknown study 'none'"),
        (['work', 'a', '--storage', 'sqlite:////none/a.db'], 'no such file'),
        (['work', 'a', '--storage', 'postgres'], 'cannot be opened'),
        (['status', 'a', '--study', 'b'], 'unexpected'),
        (['work', 'a', '--trials', '0'], 'at least 1'),
        (['plot', 'a', '--output', 'a.doc'], 'must end in'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(['sweep', *words]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message)
    assert error.count('\n') == 1


@pytest.mark.parametrize('first', [['sweep'], ['launch', 'slurm', '--', 'sweep']])
@pytest.mark.parametrize(
    ('metric', 'key', 'message'),
    [
        ('tset/accuracy', 'seed', "did you mean 'test'"),
        ('test', 'seed', ('number', 'evaluation')),
        ('test/acuracy', 'seed', "did you mean 'test/accuracy'"),
        ('test/accuracy', 'sede', "did you mean 'seed'"),
    ],
)
def test_a_sweep_that_cannot_run_queues_nothing(tmp_path, capsys, first, metric, key, message):
    file = tmp_path / 'sweep.py'
    file.write_text(
        'from vit_jax.sweeps.space import Sweep\n'
        'def get_sweep(arg=None):\n'
        "    config = 'experiments/vit/digits.py:smoke'\n"
        f'    return Sweep(config, {metric!r}, points=[{{{key!r}: 0}}])\n'
    )
    words = ['create', str(file), '--study', 'a', '--workdir', str(tmp_path / 'study')]
    assert main([*first, *words]) == 2
    assert mentions(capsys.readouterr().err, message)
    assert not (tmp_path / 'study').exists()


def test_without_optuna_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command, 'PACKAGES', ('no_such_package',))
    assert main(['sweep', 'status', 'a']) == 2
    assert "pip install -e '.[sweep]'" in capsys.readouterr().err


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """The file that the package `stranger`, which is on the path, writes when it is imported."""
    package = tmp_path / 'code' / 'stranger'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text(f'open({str(tmp_path / "imported")!r}, "w").close()\n')
    (package / 'vit.py').write_text('from vit_jax.models.vit import Model\n')
    monkeypatch.syspath_prepend(package.parent)
    yield tmp_path / 'imported'
    for name in [name for name in sys.modules if name.partition('.')[0] == 'stranger']:
        del sys.modules[name]


@pytest.mark.parametrize('where', ['base', 'points'])
def test_a_study_imports_nothing_that_is_not_allowed(
    where, stranger, tmp_path, fake_training, capsys
):
    made = make(tmp_path / 'runs', points=grid({'model.name': ['vit']}))
    study = made.load(0)
    if where == 'base':
        base = made.base.to_dict()
        study.set_user_attr('base', base | {'task': {'name': 'stranger.tasks.classify'}})
    else:
        points = [{'model.name': 'stranger.vit'}]
        tampered = Sweep(config='a', metric=METRIC, points=points)
        study.set_user_attr('sweep', space.to_json(tampered))
    words = ['name', '--workdir', str(tmp_path / 'runs')]
    assert main(['sweep', 'work', *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says(line, "'name' names 'stranger.")
    assert line.endswith('--allow stranger')
    assert main(['sweep', 'status', *words]) == 0
    assert 'waiting 1' in capsys.readouterr().out
    assert not stranger.exists()


def test_a_study_of_code_that_is_allowed(stranger, tmp_path, fake_training):
    make(tmp_path / 'runs', points=grid({'model.name': ['stranger.vit']}))
    fake_training(lambda config, step: 1.0)
    words = ['name', '--workdir', str(tmp_path / 'runs')]
    assert main(['sweep', 'work', *words]) == 2
    assert main(['sweep', 'work', *words, '--allow', 'stranger']) == 0
