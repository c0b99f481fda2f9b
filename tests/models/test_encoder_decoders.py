"""What holds of every encoder-decoder: cached steps, what may see what, dropout, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sequences import SOURCE, TARGET_IN, forward, perturbed, shapes

from vit_jax.models import rnn_seq2seq, seq2seq

pytestmark = pytest.mark.slow  # as a whole

TRANSFORMER = seq2seq.Model(vocab_size=23, width=16, depth=2, num_heads=2, mlp_dim=24)
OTHERWISE = {'norm': 'pre', 'positions': 'concatenated', 'tied': False, 'activation': 'gelu'}
LSTM = rnn_seq2seq.Model(vocab_size=17, width=6, embed_dim=5, depth=2)
MODELS = {
    'post-norm': TRANSFORMER,
    'pre-norm': dataclasses.replace(TRANSFORMER, **OTHERWISE),
    **{kind: dataclasses.replace(LSTM, attention=kind) for kind in rnn_seq2seq.ATTENTIONS},
}
every_model = pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)
one_of_each = pytest.mark.parametrize('model', [TRANSFORMER, LSTM], ids=['transformer', 'lstm'])


@functools.cache
def stepwise(model):
    """The logits of teacher forcing, the cache before the first step, and the compiled step."""
    params = perturbed(model)
    logits, variables = forward(model, params)['logits'], {'params': params}

    @jax.jit
    def start(variables):
        memory = model.apply(variables, SOURCE, method='encode')
        return model.apply(variables, memory, 7, method='init_cache')

    step = jax.jit(lambda *args: model.apply(variables, *args, method='decode_step'))
    return np.asarray(logits), start(variables), step


@every_model
@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 0)])
def test_steps_equal_teacher_forcing_and_rows_of_a_cache_can_be_gathered(model, order):
    """The rows change places after the second step."""
    logits, cache, step = stepwise(model)
    order, target_in = np.array(order), np.asarray(TARGET_IN)
    for i in range(TARGET_IN.shape[1]):
        found, cache = step(cache, target_in[:, i], np.int32(i))
        np.testing.assert_allclose(found, logits[:, i] if i < 2 else logits[order, i], atol=1e-5)
        if i == 1:
            cache = jax.tree.map(lambda x: np.asarray(x)[order], cache)
            target_in = target_in[order]


@one_of_each
def test_the_decoder_does_not_see_the_future(model):
    params = perturbed(model)
    logits = forward(model, params)['logits']
    changed = forward(model, params, target_in=TARGET_IN.at[:, 3].set(13))['logits']
    np.testing.assert_array_equal(changed[:, :3], logits[:, :3])
    assert (changed[:, 3:] != logits[:, 3:]).any(-1).all()


@one_of_each
def test_padding_of_the_source_changes_nothing(model):
    params = perturbed(model)
    logits = forward(model, params)['logits']
    padded = forward(model, params, source=jnp.pad(SOURCE, ((0, 0), (0, 3))))['logits']
    np.testing.assert_allclose(padded, logits, atol=1e-5)
    alone = forward(model, params, source=SOURCE[2:, :2], target_in=TARGET_IN[2:])['logits']
    np.testing.assert_allclose(alone, logits[2:], atol=1e-5)


@every_model
def test_gradients_reach_every_parameter_and_empty_rows_do_no_harm(model):
    source, target_in = (x.at[1].set(0) for x in (SOURCE, TARGET_IN))

    def loss(params):
        return (model.apply({'params': params}, source, target_in)['logits'] ** 2).sum()

    grads = jax.jit(jax.grad(loss))(perturbed(model))
    assert all(0 < np.abs(g).max() < np.inf for g in jax.tree.leaves(grads))


@one_of_each
def test_dropout_acts_in_training_alone(model):
    params = perturbed(model)
    dropping = dataclasses.replace(model, dropout=0.5)
    expected = forward(model, params)['logits']
    np.testing.assert_array_equal(forward(dropping, params)['logits'], expected)
    rngs = {'dropout': jax.random.key(0)}
    trained = forward(dropping, params, train=True, rngs=rngs)['logits']
    assert (trained != expected).any(-1).all()


@one_of_each
def test_bfloat16_computes_close_to_float32_with_float32_parameters(model):
    half = dataclasses.replace(model, dtype='bfloat16')
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(half))} == {jnp.dtype('float32')}
    params = perturbed(model)
    expected, outputs = (forward(each, params) for each in (model, half))
    assert outputs['memory'].dtype == jnp.bfloat16
    assert outputs['logits'].dtype == jnp.float32
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some twenty roundings.
    error = np.abs(outputs['logits'] - expected['logits']).max() / np.abs(expected['logits']).max()
    assert 0 < error < 0.1
