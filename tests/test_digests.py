"""The digest that the tests compare runs by sees all there is, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.digests import tree_digest


def test_the_digest_sees_every_bit_name_shape_and_dtype():
    base = {'a': np.zeros(4, np.float32), 'b': np.ones(2, np.int32)}
    others = [
        {**base, 'a': np.array([0, 0, 0, -0.0], np.float32)},
        {**base, 'a': np.zeros((2, 2), np.float32)},
        {**base, 'a': np.zeros(4, np.int32)},
        {'c': base['a'], 'b': base['b']},
        {'a': base['a']},
    ]
    digests = {tree_digest(tree) for tree in (base, *others)}
    assert len(digests) == 1 + len(others)
    nan = np.array([np.nan], np.float32)
    assert tree_digest(nan) == tree_digest(nan.copy())


def test_the_digest_does_not_depend_on_where_arrays_lie():
    key = jax.random.key(1)
    state = {'w': jnp.arange(8.0), 'h': jnp.ones(8, jnp.bfloat16), 'key': key}
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    sharded = {**state, 'w': jax.device_put(state['w'], split)}
    as_numpy = {**state, 'w': np.asarray(state['w']), 'key': jax.random.key_data(key)}
    assert tree_digest(state) == tree_digest(sharded)
    assert tree_digest(state) == tree_digest(as_numpy)
