"""Towers for texts by themselves: exact parameter counts, causality, and what has to fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import count

from vit_jax.errors import UserError
from vit_jax.models.text_encoder import Model

TINY = {
    **{'vocab_size': 11, 'length': 5, 'width': 8, 'depth': 2, 'mlp_dim': 16, 'num_heads': 2},
    'num_classes': 3,
}
IDS = jnp.asarray([[3, 4, 5, 6, 7], [3, 4, 5, 6, 8]], jnp.int32)

# All parameters of classes of transformers for released configs.
CLIP_B = {'vocab_size': 49408, 'length': 77, 'width': 512, 'mlp_dim': 2048, 'num_heads': 8}
COUNTS = [
    ({**CLIP_B, 'num_classes': None}, 63_165_952),  # CLIPTextModel
    ({**CLIP_B, 'num_classes': 512, 'head_bias': False}, 63_428_096),  # with its projection
    ({'vocab_size': 32_000, 'num_classes': 768}, 110_271_744),  # SiglipTextModel
]


@pytest.mark.parametrize(('fields', 'parameters'), COUNTS)
def test_parameter_counts_are_exact(fields, parameters):
    model = Model(**fields, scan=True)
    ids = jnp.zeros((1, model.length), jnp.int32)
    assert count(jax.eval_shape(model.init, jax.random.key(0), ids)) == parameters


@pytest.mark.slow
@pytest.mark.parametrize('causal', [False, True])
def test_causal_tokens_do_not_see_later_ones(causal):
    model = Model(**TINY, causal=causal)
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    found = jax.jit(model.apply)(params, IDS)
    first, second = found['tokens']
    np.testing.assert_array_equal(found['pre_logits'], found['tokens'][:, -1])
    assert np.array_equal(first[:-1], second[:-1]) == causal
    assert not np.array_equal(first[-1], second[-1])


def test_the_first_end_is_pooled_and_the_first_token_where_there_is_none():
    model = Model(**TINY, eos=5)
    ids = jnp.asarray([[3, 5, 5, 4, 4], [3, 4, 4, 4, 4]], jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), ids)
    found = jax.jit(model.apply)(params, ids)
    np.testing.assert_array_equal(found['pre_logits'][0], found['tokens'][0, 1])
    np.testing.assert_array_equal(found['pre_logits'][1], found['tokens'][1, 0])


def test_without_classes_there_is_no_head():
    model = Model(**TINY | {'num_classes': None})
    made, params = jax.eval_shape(model.init_with_output, jax.random.key(0), IDS)
    assert 'logits' not in made and 'head' not in params['params']


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'num_heads': 3}, r'width 8 .* num_heads 3'),
        ({'vocab_size': 0}, r'vocab_size .* 1, not 0'),
        ({'gelu': 'relu'}, "block.gelu 'relu'"),
    ],
)
def test_fields_that_make_no_model(fields, words):
    with pytest.raises(UserError, match=words):
        Model(**TINY | fields)


def test_texts_of_another_length():
    model = Model(**TINY)
    with pytest.raises(UserError, match=r'\b3\b.*\b5\b'):
        jax.eval_shape(model.init, jax.random.key(0), IDS[:, :3])
