"""Paths of parameters, and what is said where two trees do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says

from vit_jax.errors import UserError
from vit_jax.tree_paths import block_paths, param_paths, require_fit


def leaf(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_paths_of_leaves():
    assert param_paths({'a': {'b': 1}, 'c': [2, 3]}) == {'a/b': 1, 'c/0': 2, 'c/1': 3}


@pytest.mark.parametrize(
    ('path', 'paths'),
    [
        ('encoder/blocks/mlp/bias', ['encoder/block_0/mlp/bias', 'encoder/block_1/mlp/bias']),
        ('blocks/bias', ['block_0/bias', 'block_1/bias']),
        ('encoder/block_0/bias', ['encoder/block_0/bias']),
        ('encoder/myblocks/bias', ['encoder/myblocks/bias']),
        ('blocks', ['blocks']),
    ],
)
def test_scanned_blocks_have_the_paths_of_separate_ones(path, paths):
    assert block_paths(path, leaf(2, 5)) == paths


def test_what_fits_is_no_news():
    require_fit({}, {}, 'x')
    arrays = {'a': np.ones((2, 3)), 'b': jnp.ones(4)}
    require_fit(arrays, {'b': leaf(4), 'a': leaf(2, 3)}, 'x')
    with pytest.raises(UserError, match=r'^x: a is float64'):
        require_fit(arrays, {'b': leaf(4), 'a': leaf(2, 3)}, 'x', dtypes=True)


def test_the_line_names_every_fault_with_both_shapes():
    have = {'a': leaf(1), 'b': leaf(2), 'c': leaf(3)}
    want = {'a': leaf(1), 'b': leaf(2, 2), 'd': leaf()}
    with pytest.raises(UserError) as error:
        require_fit(have, want, 'no fit', label=str.upper, first='d', advice='. Help')
    facts = 'no fit: D () is missing', 'B has shape (2,) instead of (2, 2)', 'C (3,) is unknown'
    assert says(str(error.value), *facts, 'Help')


def test_of_many_faults_the_first_few_are_named():
    with pytest.raises(UserError, match=r'^x: (a\d \(\) is missing; ){5}and 4 more$'):
        require_fit({}, {f'a{i}': leaf() for i in range(9)}, 'x')
