"""isoFLOP studies: steps for each budget by exact FLOPs, branches, prices, and mistakes."""

import dataclasses
import types

import pytest

pytest.importorskip('optuna')

from helpers import isoflop_file
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.profiling import cost
from vit_jax.sweeps import asha, isoflop, space, study
from vit_jax.sweeps.space import planned_runs

FILE = 'tests/helpers/isoflop_file.py'


@pytest.fixture(autouse=True, scope='module')
def every_shape_is_priced_once():
    """As the tests ask again and again for the same."""
    price, priced = cost.price, {}

    def once(config, *args, point=None, **options):
        key = str((config, args, point, options))
        if key not in priced:
            priced[key] = price(config, *args, point=point, **options)
        return priced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, 'price', once)
        yield


def of(**changes):
    return dataclasses.replace(isoflop_file.get_sweep(), **changes)


def test_each_run_spends_its_budget():
    for run in isoflop.runs(of()):
        assert run.plan.flops == pytest.approx(run.budget, rel=isoflop.TOLERANCE)
        assert run.warmup == max(1, round(0.05 * run.plan.steps))


@pytest.mark.slow
@pytest.mark.parametrize('cooldown', [0.0, 0.2])
def test_the_bill_is_the_price_of_the_sweep(cooldown):
    family = of(cooldown=cooldown, seeds=(2, 1))
    bill, sweep = isoflop.study_cost(family), family.sweep()
    assert bill.trained == pytest.approx(sum(run.flops for run in planned_runs(sweep)))
    assert (bill.trained < 0.9 * bill.separate) == bool(cooldown)
    assert 0 < bill.seeds < bill.trained / 2


def test_branches_share_a_trunk_that_keeps_where_they_leave():
    sweep = of(cooldown=0.2, seeds=(2, 1)).sweep()
    trunks = [point for point in sweep.points if not point['branch.step']]
    assert sweep.points[: len(trunks)] == trunks and len(trunks) == 6
    assert len(sweep.points) == 6 + 3 * (2 + 1 + 1)
    for point in sweep.points[len(trunks) :]:
        trunk = trunks[asha.trunk_of(point)]
        total, cooldown = (
            int(point[name].split()[0]) for name in ('total', 'optim.schedule.cooldown')
        )
        assert point['branch.step'] == total - cooldown
        assert f'{point["branch.step"]}' in trunk['checkpoint.keep_steps']
        for name in ('model.width', 'seed', 'optim.schedule.warmup'):
            assert point[name] == trunk[name]
        assert cooldown == round(0.2 * total)
    assert sweep.overrides['optim.schedule.name'] == 'constant'


@pytest.mark.parametrize('cooldown', [0.0, 0.2])
def test_sizes_move_with_the_optimum(cooldown):
    shapes = [{'model.width': w, 'model.mlp_dim': 2 * w} for w in (8, 12, 16, 20, 24)]
    family = of(shapes=shapes, optimum=(750, 1e8), per_budget=3, cooldown=cooldown)
    found = {
        c: [r.shape['model.width'] for r in isoflop.runs(family) if r.budget == c]
        for c in family.budgets
    }
    assert {len(widths) for widths in found.values()} == {3}
    assert found[1e8] == [8, 12, 16] and found[1.6e9] == [16, 20, 24]
    sweep = family.sweep()
    assert len(sweep.points) == 9 + (5 if cooldown else 0)


def test_batches_grow_with_the_budget_by_powers_of_two():
    family = of(budgets=(1e8, 4e8, 1.6e9), batch_exponent=0.5)
    found = {run.budget: run.plan.batch_size for run in isoflop.runs(family)}
    assert found == {1e8: 8, 4e8: 16, 1.6e9: 32}
    assert {point['batch_size'] for point in family.sweep().points} == {8, 16, 32}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'budgets': (1.0,)}, r'budget 1 .* model.width=8'),
        ({'budgets': (3e6,)}, 'budgets.*2%'),
        ({'budgets': ()}, 'give positive numbers'),
        ({'budgets': (1e8, float('nan'))}, 'give positive numbers'),
        ({'budgets': (1e8, 1.1e8)}, 'differ.*1.3'),
        ({'shapes': [{'model.width': 8}] * 2}, 'three.*shapes'),
        ({'shapes': [{'model.width': 8}, {'model.depth': 1}, {}]}, 'the same dimensions'),
        ({'seeds': (0,)}, 'at least one'),
        ({'optimum': (0, 1e8)}, 'optimum'),
        ({'optimum': (1e9, 1e8)}, 'add shapes'),
        ({'optimum': (1e3, 1e8), 'exponent': 2.0}, 'exponent'),
        ({'optimum': (1e3, 1e8), 'per_budget': 2}, 'per_budget'),
        ({'cooldown': 0.96}, 'together less than 1'),
        ({'cooldown': 0.2, 'batch_exponent': 0.5}, 'batch.*trunk'),
    ],
)
def test_a_mistake_is_named(changes, message):
    with pytest.raises(UserError, match=message):
        of(**changes).sweep()


def test_a_file_may_return_a_family():
    assert space.load_sweep(FILE).points == of().sweep().points


def test_the_command_prices_first_and_creates_if_asked(tmp_path, capsys):
    words = ['scaling', 'study', FILE, '--budget', '1e8,4e8']
    assert main(words) == 0
    out = capsys.readouterr().out
    assert '6 runs: ' in out and 'chip-hours of TPU v3' in out and '--study NAME' in out
    folder = tmp_path / 'made'
    assert main([*words, '--study', 'made', '--workdir', str(folder)]) == 0
    assert 'created made: 6 trials' in capsys.readouterr().out
    assert len(study.open_study('made', folder=folder).trials()) == 6


def test_hours_are_measured_if_asked(capsys, monkeypatch, one_device):
    """At 100 examples a second of every shape; the benchmark's own tests time real steps."""
    timing = types.SimpleNamespace(images_per_sec=100.0)
    monkeypatch.setattr(isoflop.benchmark.PreparedSteps, 'train', lambda self, *_: timing)
    assert main(['scaling', 'study', FILE, '--budget', '1e8', '--measure']) == 0
    hours = sum(run.plan.examples for run in isoflop.runs(of(budgets=(1e8,)))) / 100 / 3600
    assert mentions(capsys.readouterr().out, f'{hours:.3g}', 'hours', 'machine')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([FILE, '--budget', 'much'], "--budget 'much': write FLOPs"),
        ([FILE, '--budget', '1'], 'step'),
        ([FILE, '--budget', '1e8,1e8'], 'differ'),
        ([f'{FILE}:bit'], 'branched=bit'),
        (['experiments/sweeps/digits.py'], ('return', 'Isoflop')),
        (['experiments/vit/digits.py'], 'no function get_sweep'),
        ([FILE, '--device', 'abacus'], "--device 'abacus'"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(words, message, capsys):
    assert main(['scaling', 'study', *words]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message) and error.count('\n') == 1
