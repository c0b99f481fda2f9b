"""What holds of every encoder-decoder: cached steps, what may see what, dropout, dtypes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sequences
from helpers.sequences import forward, perturbed, shapes

from vit_jax.models import rnn_seq2seq, seq2seq

pytestmark = pytest.mark.slow  # as a whole

SOURCE, TARGET_IN = np.asarray(sequences.SOURCE), np.asarray(sequences.TARGET_IN)
TRANSFORMER = seq2seq.Model(vocab_size=23, width=16, depth=1, num_heads=2, mlp_dim=24)
OTHERWISE = {'norm': 'pre', 'positions': 'concatenated', 'tied': False, 'activation': 'gelu'}
LSTM = rnn_seq2seq.Model(vocab_size=17, width=6, embed_dim=5, depth=2)
MODELS = {
    'post-norm': TRANSFORMER,
    'pre-norm': dataclasses.replace(TRANSFORMER, **OTHERWISE, depth=2),
    'additive': LSTM,
    'dot_product': dataclasses.replace(LSTM, attention='dot_product', depth=1),
    'scaled_dot_product': dataclasses.replace(LSTM, attention='scaled_dot_product', depth=1),
}
# The equations of its scores are tested in test_rnn_seq2seq.py.
ALIKE = dict.fromkeys(('dot_product', 'scaled_dot_product', 'post-norm'), pytest.mark.long)
every_model = pytest.mark.parametrize(
    'model', [pytest.param(m, id=name, marks=ALIKE.get(name, ())) for name, m in MODELS.items()]
)
one_of_each = pytest.mark.parametrize('model', [TRANSFORMER, LSTM], ids=['transformer', 'lstm'])


@functools.cache
def compiled(model):
    """Parameters; what gives logits, the cache before the first step and gradients; the step."""

    def loss(params, source, target_in):
        def call(model):
            memory = model.encode(source)
            return model.decode(memory, target_in), model.init_cache(memory, 7)

        logits, cache = model.apply({'params': params}, method=call)
        return (logits**2).sum(), (logits, cache)

    @jax.jit
    def start(*args):
        (_, (logits, cache)), grads = jax.value_and_grad(loss, has_aux=True)(*args)
        return logits, cache, grads

    @jax.jit
    def step(params, *args):
        return model.apply({'params': params}, *args, method='decode_step')

    return perturbed(model), start, step


def test_every_attention_is_among_the_models():
    assert set(rnn_seq2seq.ATTENTIONS) < set(MODELS)


@every_model
@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 0)])
def test_steps_equal_teacher_forcing_and_rows_of_a_cache_can_be_gathered(model, order):
    """The rows change places after the second step."""
    params, start, step = compiled(model)
    logits, cache, _ = start(params, SOURCE, TARGET_IN)
    logits, order, target_in = np.asarray(logits), np.array(order), TARGET_IN
    for i in range(TARGET_IN.shape[1]):
        found, cache = step(params, cache, target_in[:, i], np.int32(i))
        np.testing.assert_allclose(found, logits[:, i] if i < 2 else logits[order, i], atol=1e-5)
        if i == 1:
            cache = jax.tree.map(lambda x: np.asarray(x)[order], cache)
            target_in = target_in[order]


@one_of_each
def test_the_decoder_does_not_see_the_future(model):
    params, start, _ = compiled(model)
    other = np.where(np.arange(5) == 3, 13, TARGET_IN)
    logits, changed = (np.asarray(start(params, SOURCE, x)[0]) for x in (TARGET_IN, other))
    np.testing.assert_array_equal(changed[:, :3], logits[:, :3])
    assert (changed[:, 3:] != logits[:, 3:]).any(-1).all()


@one_of_each
def test_padding_of_the_source_changes_nothing(model):
    params = perturbed(model)
    logits = forward(model, params)['logits']
    alone = forward(model, params, source=SOURCE[2:, :2], target_in=TARGET_IN[2:])['logits']
    np.testing.assert_allclose(alone, logits[2:], atol=1e-5)


@every_model
def test_gradients_reach_every_parameter_and_empty_rows_do_no_harm(model):
    params, start, _ = compiled(model)
    kept = np.array([[1], [0], [1]])
    _, _, grads = start(params, SOURCE * kept, TARGET_IN * kept)
    assert all(0 < np.abs(g).max() < np.inf for g in jax.tree.leaves(grads))


@one_of_each
def test_dropout_acts_in_training_alone(model):
    params = perturbed(model)
    dropping = dataclasses.replace(model, dropout=0.5)
    expected = forward(model, params)['logits']
    np.testing.assert_array_equal(forward(dropping, params)['logits'], expected)
    rngs = {'dropout': jax.random.key(0)}
    trained = forward(dropping, params, train=True, rngs=rngs)['logits']
    assert (np.asarray(trained) != expected).any(-1).all()


@one_of_each
def test_bfloat16_computes_close_to_float32_with_float32_parameters(model):
    half = dataclasses.replace(model, dtype='bfloat16')
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(half))} == {jnp.dtype('float32')}
    params = perturbed(model)
    expected, outputs = (jax.device_get(forward(each, params)) for each in (model, half))
    assert outputs['memory'].dtype == jnp.bfloat16
    assert outputs['logits'].dtype == jnp.float32
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some twenty roundings.
    error = np.abs(outputs['logits'] - expected['logits']).max() / np.abs(expected['logits']).max()
    assert 0 < error < 0.1
