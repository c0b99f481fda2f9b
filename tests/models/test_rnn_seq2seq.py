"""The LSTM with attention: its equations in NumPy, parameter counts, mistakes."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.sequences import SOURCE, TARGET_IN, count, forward, perturbed, shapes

from vit_jax.errors import UserError
from vit_jax.models.rnn_seq2seq import ATTENTIONS, Model

VOCAB = 17
TINY = {'vocab_size': VOCAB, 'width': 6, 'embed_dim': 5, 'depth': 2}


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


@pytest.mark.slow
@pytest.mark.parametrize('attention', ATTENTIONS)
def test_model_is_its_equations(attention):
    model = Model(**TINY, attention=attention)
    params = perturbed(model)
    outputs, kept = jax.device_get(forward(model, params, mutable='intermediates'))
    (weights,) = kept['intermediates']['decoder']['attention']
    assert weights.shape == (3, 1, 5, 6)
    assert outputs['memory'].shape == (3, 6, 2 * 6)
    sentences = zip(np.asarray(SOURCE), np.asarray(TARGET_IN), strict=True)
    for row, (source, target_in) in enumerate(sentences):
        real = source[source != 0]
        logits, attention = reference(model, params, real, target_in)
        np.testing.assert_allclose(outputs['logits'][row], logits, atol=1e-5)
        np.testing.assert_allclose(weights[row, 0, :, : len(real)], attention, atol=1e-5)
        assert not weights[row, 0, :, len(real) :].any()


def test_parameters_of_one_layer():
    model = Model(vocab_size=100, width=10, embed_dim=7, attention='additive')
    encoder, decoder = 2 * (7 + 1 + 10) * 40, (7 + 20 + 1 + 10) * 40
    attention = 20 * 10 + (10 + 1) * 10 + 10  # U, W and its bias, v
    bridge, readout = (10 + 1) * 10, (30 + 1) * 7
    total = 3 * 700 + encoder + decoder + attention + bridge + readout
    assert count(shapes(model)) == total
    tied = dataclasses.replace(model, tied=True)
    assert count(shapes(tied)) == total - 2 * 700


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'attention': 'addition'}, r"unknown attention 'addition'; .* 'additive'"),
        ({'dtype': 'float8'}, "unknown dtype 'float8'"),
        ({'depth': 0}, r'depth .* 1, not 0'),
        ({'dropout': 1.0}, r'dropout .* 0 .* 1, not 1.0'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**{**TINY, **fields})
