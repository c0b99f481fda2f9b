import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sections import optimizer, schedule, section, times

from vit_jax.config.run import Step
from vit_jax.errors import UserError
from vit_jax.optim.schedules import average_decays


def values(name, steps, **options):
    function = schedule(2.0, 100, name=name, **options)
    return np.asarray(jax.jit(jax.vmap(function))(np.asarray(steps)))


@pytest.mark.parametrize('name', ['constant', 'linear', 'cosine', 'rsqrt'])
def test_warmup_rises_linearly_to_the_peak(name):
    got = values(name, [0, 5, 9, 10], warmup=10, init=0.2)
    np.testing.assert_allclose(got, [0.2, 1.1, 1.82, 2.0], rtol=1e-6)


@pytest.mark.parametrize('name', ['constant', 'linear', 'cosine', 'rsqrt'])
def test_without_warmup_it_starts_at_the_peak(name):
    np.testing.assert_allclose(values(name, [0]), [2.0], rtol=1e-6)


def test_linear_and_cosine_reach_final_at_the_end():
    steps = [20, 40, 60, 80, 100, 1000]
    linear = values('linear', steps, warmup=20, final=0.4)
    np.testing.assert_allclose(linear, [2.0, 1.6, 1.2, 0.8, 0.4, 0.4], rtol=1e-6)
    quarter = np.cos(np.pi / 4)
    cosine = values('cosine', steps, warmup=20, final=0.4)
    expected = [2.0, 1.2 + 0.8 * quarter, 1.2, 1.2 - 0.8 * quarter, 0.4, 0.4]
    np.testing.assert_allclose(cosine, expected, rtol=1e-6)


def test_polynomial_falls_with_a_power_of_the_steps_left():
    got = values('polynomial', [20, 60, 100, 1000], warmup=20, final=0.4, power=2.0)
    np.testing.assert_allclose(got, [2.0, 0.4 + 1.6 / 4, 0.4, 0.4], rtol=1e-6)
    with pytest.raises(UserError, match='power=0: must be positive'):
        schedule(1.0, 10, name='polynomial', power=0)


def test_constant_stays():
    np.testing.assert_array_equal(values('constant', [0, 1, 50, 99, 100, 1000]), 2.0)


@pytest.mark.slow
def test_stair_is_that_of_bit():
    options = {'warmup': 10, 'boundaries': (30, 60, 90)}
    got = values('stair', [0, 5, 10, 29, 30, 59, 60, 89, 90, 100, 1000], **options)
    expected = [0, 1, 2, 2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002, 0.002]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    halved = values('stair', [9, 10], boundaries=(10,), factor=0.5)
    np.testing.assert_allclose(halved, [2.0, 1.0], rtol=1e-6)


def test_rsqrt_halves_when_three_timescales_have_passed():
    got = values('rsqrt', [10, 18, 34, 74], warmup=10, timescale=8)
    np.testing.assert_allclose(got, [2.0, 2 / np.sqrt(2), 1.0, 2 / 3], rtol=1e-6)


def test_the_rate_of_the_transformer_counts_its_first_update_as_one():
    """With a warm-up one shorter that starts at the rate of step 1; equation 3 to the step."""
    d, warmup = 512, 40
    peak = (d * warmup) ** -0.5
    options = dict(name='rsqrt', warmup=warmup - 1, timescale=warmup, init=peak / warmup)
    rate = jax.jit(schedule(peak, 200, **options))
    for update in np.linspace(0, 199, 20, dtype=int):
        t = update + 1
        paper = d**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert float(rate(update)) == pytest.approx(paper, rel=1e-6)


def test_rsqrt_with_timescale_of_the_warmup_is_that_of_the_transformer():
    d, warmup = 512, 40
    peak = d**-0.5 * warmup**-0.5
    options = dict(name='rsqrt', warmup=warmup, timescale=warmup)
    rate = jax.jit(schedule(peak, 100, **options))
    for t in (1, 20, 40, 60, 100):
        paper = d**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert float(rate(t)) == pytest.approx(paper, rel=1e-6)


@pytest.mark.parametrize('name', ['constant', 'linear', 'cosine', 'rsqrt'])
@pytest.mark.parametrize('final', [0.0, 0.1])
def test_cooldown_is_a_straight_line_from_the_shape_to_final(name, final):
    options = {'warmup': 10, 'final': final, 'timescale': 30}
    if name in ('constant', 'rsqrt'):
        plain = values(name, [80], **{**options, 'final': 0.0})
    else:
        plain = values(name, [80], **options)
    cooled = values(name, [80, 85, 90, 100, 200], cooldown=20, **options)
    expected = final + (plain - final) * np.array([1, 0.75, 0.5, 0, 0])
    np.testing.assert_allclose(cooled, expected, rtol=1e-5, atol=1e-7)
    assert cooled[-1] == np.float32(final)


def zhai(step, lr=8e-4, total=20_000, warmup=10_000, timescale=10_000, cooldown=10_000):
    """Published: rsqrt after the warm-up, times a ramp down in the last steps."""
    rate = lr / np.sqrt(1 + max(step - warmup, 0) / timescale)
    return rate * min(1, step / warmup) * min(1, (total - step) / cooldown)


def test_rsqrt_with_cooldown_as_a_product_is_that_of_zhai():
    options = dict(name='rsqrt', warmup=10_000, timescale=10_000, cooldown=10_000)
    product = jax.jit(schedule(8e-4, 20_000, cooldown_form='product', **options))
    steps = np.linspace(0, 20_000, 20, dtype=int)
    expected = [zhai(step) for step in steps]
    np.testing.assert_allclose([product(s) for s in steps], expected, rtol=1e-5, atol=1e-12)
    # A line keeps 14 % more of the rate in this cooldown.
    by_line = jax.jit(schedule(8e-4, 20_000, **options))
    line = np.asarray(by_line(np.arange(10_000, 20_001)))
    assert line.sum() / sum(map(zhai, range(10_000, 20_001))) == pytest.approx(1.14, abs=0.01)


@pytest.mark.parametrize('name', ['constant', 'linear', 'cosine', 'rsqrt'])
def test_a_product_comes_down_to_final(name):
    final = values(name, [100, 101], cooldown=30, cooldown_form='product', final=0.1)
    np.testing.assert_allclose(final, 0.1, rtol=1e-6)


def test_cooldown_leaves_what_comes_before_unchanged():
    steps = np.arange(81)
    np.testing.assert_array_equal(
        values('rsqrt', steps, warmup=10, cooldown=20), values('rsqrt', steps, warmup=10)
    )


def test_warmup_and_cooldown_may_fill_all_of_training():
    got = values('cosine', [0, 20, 40, 70, 100], warmup=40, cooldown=60)
    np.testing.assert_allclose(got, [0, 1, 2, 1, 0], atol=1e-6)


def test_a_warm_up_that_does_not_fit_is_shortened():
    fits = values('linear', [30, 60], warmup=60, cooldown=40)
    np.testing.assert_allclose(fits, [1.0, 2.0], rtol=1e-6)
    shortened = values('linear', [3, 6], warmup=61, cooldown=40)  # a tenth of 60 steps
    np.testing.assert_allclose(shortened, [1.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'name': 'cosin'}, r"unknown schedule 'cosin'; .* 'cosine'"),
        ({'peak': float('nan')}, 'peak=nan'),
        ({'peak': -1.0}, 'peak=-1.0'),
        ({'final': -1e-5}, 'final=-1e-05'),
        ({'cooldown_form': 'lin'}, r"unknown form 'lin'; .* 'line'"),
        ({'total': 0}, 'step'),
        ({'warmup': -1}, 'duration=-1'),
        ({'cooldown': 101}, 'fit.*100 steps'),
        ({'name': 'rsqrt', 'timescale': 0}, 'timescale=0'),
        ({'name': 'constant', 'final': 0.1}, 'cooldown'),
        ({'name': 'stair'}, 'increasing'),
        ({'name': 'stair', 'boundaries': (60, 30)}, r'boundaries=\(60, 30\) .* increasing'),
        ({'name': 'stair', 'boundaries': (30,), 'warmup': 40}, 'warm-up.*40'),
        ({'name': 'stair', 'boundaries': (30, 100)}, 'the end at 100'),
        ({'name': 'stair', 'boundaries': (30,), 'factor': 0.0}, 'factor=0.0'),
        ({'name': 'stair', 'boundaries': (30,), 'final': 0.1}, 'cooldown'),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        schedule(**{'name': 'cosine', 'peak': 1.0, 'total': 100} | options)


@pytest.mark.parametrize('name', ['adamw', 'sgd', 'lion', 'adafactor'])
def test_weight_decay_follows_a_schedule(name):
    """Without a gradient, a step takes lr * strength of a parameter away."""
    params = {'kernel': jnp.full((2, 2), 100.0)}
    keywords = {'lr': 0.01, 'weight_decay': 0.4}
    falling = {'name': 'linear', 'final': 0.0}
    tx, _ = optimizer(params, 4, name=name, **keywords, decay_schedule=falling)
    state, shares = tx.init(params), []
    for _ in range(4):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        shares.append(float(-updates['kernel'].mean()))
    np.testing.assert_allclose(shares, [0.4, 0.3, 0.2, 0.1], rtol=1e-4)


@pytest.mark.parametrize(
    ('warmup', 'expected'), [(False, [0.0, 0.0, 0.9, 0.9]), (True, [0.0, 0.0, 1 / 10, 2 / 11])]
)
def test_an_average_equals_the_parameters_up_to_its_start(warmup, expected):
    step = section(Step, ema_decay=0.9, ema_start='50%', ema_warmup=warmup)
    (decay,) = average_decays(step, times(4))
    np.testing.assert_allclose([decay(k) for k in range(4)], expected, rtol=1e-6)
