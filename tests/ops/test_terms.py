"""Terms of a loss: means, their weighted total, and counts that are zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.ops import terms
from vit_jax.ops.terms import Term

PARTS = {
    'first': {'a': Term(jnp.float32(3), 2), 'b': Term(jnp.float32(8), jnp.int32(0), 0.5)},
    'second': {'a': Term(jnp.float32(1), 2), 'b': Term(jnp.float32(2), jnp.int32(5), 0.5)},
}


def test_the_shares_of_the_parts_add_up_to_the_mean_of_the_whole():
    counts = [terms.counts(part) for part in PARTS.values()]
    over = jax.tree.map(jnp.add, *counts)
    shares = [terms.means(part, over) for part in PARTS.values()]
    means = jax.tree.map(jnp.add, *shares)
    assert means == {'a': pytest.approx(4 / 4), 'b': pytest.approx(10 / 5)}
    losses = [terms.total(p, s) for p, s in zip(PARTS.values(), shares, strict=True)]
    assert float(sum(losses)) == pytest.approx(1 + 0.5 * 2)


def test_a_term_that_counts_nothing_is_zero_and_so_is_its_gradient():
    def loss(x):
        found = {'a': Term(x**2, 2), 'empty': Term(x * 7, jnp.zeros((), jnp.int32))}
        means = terms.means(found)
        return terms.total(found, means), means

    (value, means), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(3.0)
    assert (float(value), float(means['empty']), float(grad)) == (4.5, 0.0, 3.0)


def test_a_metric_that_is_not_finite_leaves_the_loss_alone():
    def loss(x):
        found = {'loss': Term(x**2, 1), 'metric': Term(jnp.log(-x), 1, weight=0.0)}
        return terms.total(found, terms.means(found))

    assert [float(y) for y in jax.jit(jax.value_and_grad(loss))(1.0)] == [1.0, 2.0]


def test_no_gradient_flows_into_a_count():
    def loss(x):
        found = {'a': Term(x, x)}
        return terms.total(found, terms.means(found))

    np.testing.assert_allclose(jax.jit(jax.value_and_grad(loss))(4.0), (1.0, 0.25))


@pytest.mark.fault(111)
def test_scores_that_are_not_finite_are_no_hit_and_no_miss():
    scores = jnp.array([[1.0, 3, 2], [1, 2, 3], [-jnp.inf, 2, 1], [jnp.nan, 2, 1], [jnp.inf, 2, 1]])
    found = jax.jit(terms.hits)(scores, jnp.array([1, 1, 1, 0, 0]))
    np.testing.assert_array_equal(found, [1, 0, 1, np.nan, np.nan])
