"""The LSTM with attention: its equations in NumPy, decoding step by step, padding, mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models.rnn_seq2seq import ATTENTIONS, Model

VOCAB = 17
TINY = {'vocab_size': VOCAB, 'width': 6, 'embed_dim': 5, 'depth': 2}
SOURCE = jnp.array([[5, 6, 7, 8, 2], [10, 11, 2, 0, 0], [12, 2, 0, 0, 0]])
TARGET_IN = jnp.array([[1, 4, 5, 6], [1, 8, 9, 0], [1, 11, 0, 0]])


def shapes(model):
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)['params']


def perturbed(model):
    """Parameters none of which is zero or like another."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: jnp.asarray(0.4 * rng.normal(size=p.shape), jnp.float32), shapes(model)
    )


def forward(model, params, source=SOURCE, target_in=TARGET_IN, **kwargs):
    with jax.default_matmul_precision('highest'):
        return jax.jit(lambda p: model.apply({'params': p}, source, target_in, **kwargs))(params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dense(p, x):
    return x @ p['kernel'] + p.get('bias', 0.0)


def cell(p, x, hidden, memory):
    i, f, g, o = np.split(dense(p['input'], x) + hidden @ p['recurrent'], 4)
    memory = sigmoid(f) * memory + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(memory), memory


def direction(p, xs, width):
    state, hidden = (np.zeros(width), np.zeros(width)), []
    for x in xs:
        state = cell(p, x, *state)
        hidden.append(state[0])
    return np.array(hidden)


def attend(p, kind, state, tokens):
    """Context and weights."""
    keys = tokens @ p['key']['kernel']
    if kind == 'additive':
        scores = np.tanh(dense(p['query'], state) + keys) @ p['v']
    else:
        scores = keys @ state
        scores = scores / np.sqrt(len(state)) if kind == 'scaled_dot_product' else scores
    weights = np.exp(scores) / np.exp(scores).sum()
    return weights @ tokens, weights


def reference(model, p, source, target_in):
    """Logits and attention of one sentence without padding, in float64, a loop over tokens."""
    width, layers = model.width, range(model.depth)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    x, states = p['embed']['source'][source], []
    for i in layers:
        encoder = p[f'encoder_{i}']
        forward = direction(encoder['forward'], x, width)
        backward = direction(encoder['backward'], x[::-1], width)[::-1]
        x = np.concatenate([forward, backward], axis=-1)
        states.append((np.tanh(dense(p['decoder'][f'bridge_{i}'], backward[0])), np.zeros(width)))
    decoder, logits, attention = p['decoder'], [], []
    for token in target_in:
        y = p['embed']['target'][token]
        if model.attention == 'additive':
            context, weights = attend(decoder['cross'], 'additive', states[-1][0], x)
            y = np.concatenate([y, context])
        for i in layers:
            states[i] = cell(decoder[f'layer_{i}'], y, *states[i])
            y = states[i][0]
        if model.attention != 'additive':
            context, weights = attend(decoder['cross'], model.attention, y, x)
        readout = np.tanh(dense(decoder['readout'], np.concatenate([y, context])))
        logits.append(p['embed']['output'] @ readout)
        attention.append(weights)
    return np.array(logits), np.array(attention)


@pytest.mark.parametrize('attention', ATTENTIONS)
def test_model_is_its_equations(attention):
    model = Model(**TINY, attention=attention)
    params = perturbed(model)
    outputs, kept = forward(model, params, mutable='intermediates')
    (weights,) = kept['intermediates']['decoder']['attention']
    assert weights.shape == (3, 1, 4, 5)
    assert outputs['memory'].shape == (3, 5, 2 * 6)
    for row, (source, target_in) in enumerate(zip(SOURCE, TARGET_IN, strict=True)):
        real = np.asarray(source[source != 0])
        logits, attention = reference(model, params, real, np.asarray(target_in))
        np.testing.assert_allclose(outputs['logits'][row], logits, atol=1e-5)
        np.testing.assert_allclose(weights[row, 0, :, : len(real)], attention, atol=1e-5)
        assert not weights[row, 0, :, len(real) :].any()


@pytest.mark.parametrize('attention', ATTENTIONS)
def test_steps_equal_teacher_forcing_and_rows_of_a_cache_can_be_gathered(attention):
    model = Model(**TINY, attention=attention)
    params, order = perturbed(model), jnp.array([2, 0, 0])
    logits, variables = forward(model, params)['logits'], {'params': params}
    memory = jax.jit(lambda v: model.apply(v, SOURCE, method='encode'))(variables)
    cache = model.apply(variables, memory, 9, method='init_cache')
    step = jax.jit(lambda *args: model.apply(variables, *args, method='decode_step'))
    target_in = TARGET_IN
    for i in range(TARGET_IN.shape[1]):
        found, cache = step(cache, target_in[:, i], jnp.int32(i))
        np.testing.assert_allclose(found, logits[:, i] if i < 2 else logits[order, i], atol=1e-5)
        if i == 1:
            cache = jax.tree.map(lambda x: x[order], cache)
            target_in = target_in[order]


def test_padding_of_the_source_changes_nothing():
    model = Model(**TINY)
    params = perturbed(model)
    logits = forward(model, params)['logits']
    padded = forward(model, params, source=jnp.pad(SOURCE, ((0, 0), (0, 3))))['logits']
    np.testing.assert_allclose(padded, logits, atol=1e-5)


def test_parameters_of_one_layer():
    model = Model(vocab_size=100, width=10, embed_dim=7, attention='additive')
    encoder, decoder = 2 * (7 + 1 + 10) * 40, (7 + 20 + 1 + 10) * 40
    attention = 20 * 10 + (10 + 1) * 10 + 10  # U, W and its bias, v
    bridge, readout = (10 + 1) * 10, (30 + 1) * 7
    total = 3 * 700 + encoder + decoder + attention + bridge + readout
    assert sum(p.size for p in jax.tree.leaves(shapes(model))) == total
    tied = dataclasses.replace(model, tied=True)
    assert sum(p.size for p in jax.tree.leaves(shapes(tied))) == total - 2 * 700


@pytest.mark.parametrize('attention', ['additive', 'dot_product'])
def test_gradients_reach_every_parameter_and_empty_rows_do_no_harm(attention):
    model = Model(**TINY, attention=attention)
    source, target_in = (x.at[1].set(0) for x in (SOURCE, TARGET_IN))

    def loss(params):
        return (model.apply({'params': params}, source, target_in)['logits'] ** 2).sum()

    grads = jax.jit(jax.grad(loss))(perturbed(model))
    assert all(0 < np.abs(g).max() < np.inf for g in jax.tree.leaves(grads))


def test_dropout_acts_in_training_alone():
    model = Model(**TINY, dropout=0.5)
    params = perturbed(model)
    expected = forward(dataclasses.replace(model, dropout=0.0), params)['logits']
    np.testing.assert_array_equal(forward(model, params)['logits'], expected)
    rngs = {'dropout': jax.random.key(0)}
    trained = forward(model, params, train=True, rngs=rngs)['logits']
    assert (trained != expected).any(-1).all()


def test_bfloat16_computes_close_to_float32_with_float32_parameters():
    full = Model(**TINY)
    half = dataclasses.replace(full, dtype='bfloat16')
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(half))} == {jnp.dtype('float32')}
    params = perturbed(full)
    expected, outputs = (forward(model, params) for model in (full, half))
    assert outputs['memory'].dtype == jnp.bfloat16
    assert outputs['logits'].dtype == jnp.float32
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some twenty roundings.
    error = np.abs(outputs['logits'] - expected['logits']).max() / np.abs(expected['logits']).max()
    assert 0 < error < 0.1


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'attention': 'addition'}, "unknown attention 'addition'; did you mean 'additive'"),
        ({'dtype': 'float8'}, "unknown dtype 'float8'"),
        ({'depth': 0}, 'depth must be at least 1, not 0'),
        ({'dropout': 1.0}, 'dropout must be at least 0 and below 1, not 1.0'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**{**TINY, **fields})
