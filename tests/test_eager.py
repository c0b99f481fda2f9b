"""What NumPy does for tests outside of `jax.jit` is what XLA does, and of the same kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import eager


def operations(x, i):
    """Every operation that NumPy does, on numbers with a fraction and on integers."""
    both = [
        value
        for y in (x, i, x.astype(jnp.bfloat16), x.astype(jnp.float16))
        for value in (y[1], y[1:3], y[:, 2], y[::-1], y[-1, -1], y.T, y.reshape(5, 4), y[:, None])
    ]
    mixed = [x + i, x - 1, 1 - x, x * 0.1, 0.1 * x, x + x[0], i + 1, 5 - i, i * i]
    compared = [x < 0.1, x == x[0], i != 3, i <= 2, i > x, x <= x.T[0, 0]]
    made = [
        *(jnp.zeros((2, 0)), jnp.full((2, 3), 2), jnp.arange(5), jnp.asarray([1.0, 2]), x > 9),
        *(jnp.concatenate([x, i.astype(x.dtype)]), jnp.asarray(True), jnp.asarray(2) + 1.5),
        *(jnp.float32(1e38) * x, jnp.asarray(2.0) * 3, i.astype(jnp.uint8) - 7, x * np.nan),
    ]
    return [*both, *mixed, *compared, *made]


def test_values_and_types_are_those_of_xla():
    given = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    integers = np.arange(20, dtype=np.int32).reshape(4, 5)
    with pytest.MonkeyPatch.context() as patch:
        eager.compute_on_the_host(patch)
        found = operations(jnp.asarray(given), jnp.asarray(integers))
    expected = jax.jit(operations)(given, integers)
    for ours, theirs in zip(found, expected, strict=True):
        assert jax.typeof(ours) == jax.typeof(theirs)
        assert ours.weak_type == theirs.weak_type
        np.testing.assert_array_equal(ours, theirs)


def test_an_array_is_no_view_of_what_it_was_made_from():
    given = np.zeros(100_000, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        eager.compute_on_the_host(patch)
        made = jnp.asarray(given)
        part = made[:5]
    given += 1
    jax.jit(lambda x: x + 2, donate_argnums=0)(made).block_until_ready()
    assert made.is_deleted() and not np.asarray(part).any()


def test_devices_that_were_chosen_are_kept():
    chosen = jax.device_put(np.ones(3, np.float32), jax.devices()[1])
    spread = jax.device_put(
        np.ones(8), jax.NamedSharding(jax.make_mesh((8,), ('data',)), jax.P('data'))
    )
    with pytest.MonkeyPatch.context() as patch:
        eager.compute_on_the_host(patch)
        assert (chosen + 1).devices() == chosen[:2].devices() == {jax.devices()[1]}
        assert len((spread * 2).devices()) == 8
        with jax.default_device(jax.devices()[2]):
            assert jnp.zeros(3).devices() == {jax.devices()[2]}
