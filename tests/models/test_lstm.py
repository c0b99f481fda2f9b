"""LSTM: parity with torch in both directions, padding, steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.rnn_seq2seq import LSTM

BATCH, TOKENS, INPUTS, WIDTH = 3, 6, 5, 4
LENGTHS = np.array([6, 3, 1])
MASK = jnp.asarray(np.arange(TOKENS) < LENGTHS[:, None])


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = random(BATCH, TOKENS, INPUTS)


def perturbed(seed):
    params = jax.eval_shape(LSTM(WIDTH).init, jax.random.key(0), X, MASK)['params']
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(0.5 * rng.normal(size=p.shape), p.dtype), params)


@functools.partial(jax.jit, static_argnames='reverse')
def run(params, x=X, mask=MASK, reverse=False):
    return LSTM(WIDTH).apply({'params': params}, x, mask, reverse=reverse)


@pytest.mark.slow
@pytest.mark.parity
def test_parity_with_torch_in_both_directions():
    torch = pytest.importorskip('torch')
    reference = torch.nn.LSTM(INPUTS, WIDTH, bidirectional=True, batch_first=True)
    state, hidden = {}, []
    for seed, suffix in [(1, ''), (2, '_reverse')]:
        params = perturbed(seed)
        arrays = {
            'weight_ih': params['input']['kernel'].T,
            'weight_hh': params['recurrent'].T,
            # torch has two biases, which add up.
            'bias_ih': 0.25 * params['input']['bias'],
            'bias_hh': 0.75 * params['input']['bias'],
        }
        state |= {f'{k}_l0{suffix}': torch.from_numpy(np.array(v)) for k, v in arrays.items()}
        hidden.append(run(params, reverse=bool(suffix)))
    reference.load_state_dict(state, strict=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.from_numpy(np.array(X)), torch.from_numpy(LENGTHS), batch_first=True
    )
    with torch.no_grad():
        expected, _ = torch.nn.utils.rnn.pad_packed_sequence(reference(packed)[0], True)
    ours = np.where(MASK[..., None], np.concatenate(hidden, axis=-1), 0.0)
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('reverse', [False, True])
def test_what_stands_in_the_padding_does_not_matter(reverse):
    params = perturbed(1)
    other = jnp.where(MASK[..., None], X, 100.0)
    plain, padded = run(params, X, reverse=reverse), run(params, other, reverse=reverse)
    np.testing.assert_array_equal(plain, padded)


def test_padding_keeps_the_state():
    hidden = np.asarray(run(perturbed(1)))
    np.testing.assert_array_equal(hidden[1, 3:], np.broadcast_to(hidden[1, 2], (3, WIDTH)))
    backward = run(perturbed(1), reverse=True)
    assert not backward[1, 3:].any()


def test_steps_equal_the_whole():
    params = perturbed(1)
    hidden, lstm = np.asarray(run(params, mask=np.ones_like(MASK))), LSTM(WIDTH)
    step = jax.jit(lambda x, state: lstm.apply({'params': params}, x, state, method='step'))
    state, x = lstm.zero_state(BATCH), np.asarray(X)
    for i in range(TOKENS):
        state = step(x[:, i], state)
        np.testing.assert_allclose(state.hidden, hidden[:, i], atol=1e-6)
