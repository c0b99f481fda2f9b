"""Losses and measures of depth against NumPy, and what they do not depend on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.tasks import depth
from vit_jax.tasks.base import check_rows_are_separable

RNG = np.random.default_rng(0)
TRUTH = RNG.uniform(1, 9, (3, 6, 5)).astype(np.float32)
TRUTH[0, :2] = 0
TRUTH[2] = 0  # nothing is known
GUESS = RNG.uniform(0.5, 9, (3, 6, 5)).astype(np.float32)
BATCH = {
    'image': jnp.zeros((3, 6, 5, 3), jnp.uint8),
    'depth': jnp.asarray(TRUTH),
    'mask': jnp.ones(3),
}


def stub(*images):
    return {'depth': jnp.asarray(GUESS)}


def test_measures_in_meters_count_known_pixels_of_images_that_have_some():
    sums = jax.jit(lambda batch: depth.Task().evaluate(stub, batch))(BATCH)
    expected = {'RMSE': 0.0, 'abs_rel': 0.0, 'delta1': 0.0, 'loss': 0.0}
    for guess, truth in zip(GUESS[:2].astype(float), TRUTH[:2].astype(float), strict=True):
        d, t = guess[truth > 0], truth[truth > 0]
        g = np.log(d + 1e-3) - np.log(t + 1e-3)
        expected['RMSE'] += np.sqrt(((d - t) ** 2).mean())
        expected['abs_rel'] += (abs(d - t) / t).mean()
        expected['delta1'] += (np.maximum(d / t, t / d) < 1.25).mean()
        expected['loss'] += np.sqrt(g.var() + 0.15 * g.mean() ** 2)
    assert {name: float(count) for name, (_, count) in sums.items()} == dict.fromkeys(expected, 2)
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name][0], value, rtol=1e-5, err_msg=name)


def test_inverse_depth_is_compared_up_to_scale_and_shift():
    """Both the loss, whose terms are those of MiDaS, and the measures."""
    task = depth.Task(output='inverse')
    known = TRUTH[:2] > 0
    expected = 0.0
    for guess, truth, real in zip(GUESS.astype(float), TRUTH, known, strict=False):
        normed = []
        for x in (guess[real], 1 / truth[real].astype(float)):
            x = x - np.median(x)
            normed.append(x / abs(x).mean())
        errors = np.sort(abs(normed[0] - normed[1]))
        expected += errors[: int(np.ceil(0.8 * len(errors)))].sum() / (2 * len(errors))
    evaluate = jax.jit(lambda outputs: task.evaluate(lambda *images: outputs, BATCH))
    sums = evaluate({'depth': jnp.asarray(GUESS)})
    np.testing.assert_allclose(sums['loss'][0], expected, rtol=1e-5)
    moved = evaluate({'depth': jnp.asarray(3 * GUESS + 2)})
    for name, (total, _) in sums.items():
        np.testing.assert_allclose(moved[name][0], total, rtol=1e-4, err_msg=name)
    right = evaluate({'depth': 5 / jnp.maximum(BATCH['depth'], 1) + 7})
    assert float(right['delta1'][0]) == pytest.approx(2)
    assert float(right['loss'][0]) == pytest.approx(0, abs=1e-5)
    assert float(right['RMSE'][0]) == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('output', ['meters', 'inverse'])
def test_rows_are_separate_and_gradients_finite(output):
    task = depth.Task(output=output)
    check_rows_are_separable(task, {'depth': jnp.asarray(GUESS)}, BATCH)

    def loss(guess):
        return task.loss({'depth': guess}, BATCH)['loss'].sum

    differentiate = jax.jit(jax.grad(loss))
    for guess in (GUESS, np.where(TRUTH > 0, TRUTH, 1), np.zeros_like(GUESS)):
        gradient = np.asarray(differentiate(guess.astype(np.float32)))
        assert np.isfinite(gradient).all() and not gradient[TRUTH == 0].any()
    assert np.asarray(differentiate(GUESS.astype(np.float32)))[:2].any()


def test_errors():
    with pytest.raises(UserError, match='depth'):
        depth.Task().loss({'depth': GUESS}, {'image': BATCH['image']})
    for key, value in (('output', 'feet'), ('least', 0.0), ('trimmed', 1.0), ('std', (0.0,))):
        with pytest.raises(UserError, match=key):
            dataclasses.replace(depth.Task(), **{key: value})
