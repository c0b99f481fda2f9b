"""Decoding from the caches of both models, re-scored by a pass over the whole target."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models import rnn_seq2seq, seq2seq
from vit_jax.ops import search as decode_lib
from vit_jax.ops.search import BOS, EOS, PAD, Search

VOCAB, EXTRA = 11, 4
MODELS = {
    'transformer': seq2seq.Model(VOCAB, width=16, depth=1, num_heads=2, mlp_dim=16),
    'additive': rnn_seq2seq.Model(VOCAB, width=12, embed_dim=8),
    'dot_product': rnn_seq2seq.Model(VOCAB, width=12, embed_dim=8, attention='dot_product'),
}
every_model = pytest.mark.parametrize(
    'name', ['transformer', 'additive', pytest.param('dot_product', marks=pytest.mark.long)]
)
BEAMS = 3
SOURCE = np.array(
    [[5, 6, 7, 8, 9, EOS], [10, 4, EOS, PAD, PAD, PAD], [PAD] * 6, [9, 9, 4, EOS, PAD, PAD]]
)
ROOM = SOURCE.shape[1] + EXTRA


@functools.cache
def variables_of(name):
    """Weights far from the initial ones, under which all tokens would be about as probable."""
    tokens = jax.ShapeDtypeStruct(SOURCE.shape, jnp.int32)
    shapes = jax.eval_shape(MODELS[name].init, jax.random.key(0), tokens, tokens)
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        x = (path[-1].key == 'scale') + 0.6 * rng.normal(size=leaf.shape)
        return x.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def decode(name, source, search, keys=None):
    return _decode(name, variables_of(name), source, search, keys)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _decode(name, variables, source, search, keys):
    apply = functools.partial(MODELS[name].apply, variables)
    return decode_lib.decode(apply, source, search, keys)


def teacher_forced(name, tokens):
    """log P [B K T V] of what follows each token, given the true ones before it."""
    rows = tokens.reshape(-1, ROOM)
    target_in = np.concatenate([np.full_like(rows[:, :1], BOS), rows[:, :-1]], axis=1)
    logits = _forward(name, variables_of(name), np.repeat(SOURCE, BEAMS, axis=0), target_in)
    return np.asarray(jax.nn.log_softmax(logits), np.float64).reshape(*tokens.shape, VOCAB)


@functools.partial(jax.jit, static_argnums=0)
def _forward(name, variables, source, target_in):
    return MODELS[name].apply(variables, source, target_in)['logits']


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'transformer',
        *(pytest.param(x, marks=pytest.mark.long) for x in ('additive', 'dot_product')),
    ],
)
def test_scores_of_beam_search_are_those_of_teacher_forcing(name):
    search = Search(beams=BEAMS, alpha=0.6, extra_len=EXTRA, stop='all')
    tokens, lengths, scores = map(np.asarray, decode(name, SOURCE, search))
    assert tokens.shape == (4, BEAMS, ROOM)
    gains = np.take_along_axis(teacher_forced(name, tokens), tokens[..., None], axis=-1)[..., 0]
    sums = np.where(np.arange(ROOM) < lengths[..., None], gains, 0).sum(-1)
    expected = sums / ((5 + lengths) / 6) ** 0.6
    real = [0, 1, 3]
    np.testing.assert_allclose(scores[real], expected[real], rtol=1e-4)
    assert all(len({tuple(x) for x in tokens[i]}) == BEAMS for i in real)
    assert len(np.unique(lengths[real])) > 1


@pytest.mark.slow
@every_model
def test_greedy_is_the_most_probable_token_of_teacher_forcing(name):
    tokens, lengths, _ = map(np.asarray, decode(name, SOURCE, Search('greedy', extra_len=EXTRA)))
    best = teacher_forced(name, np.repeat(tokens, BEAMS, axis=1))[:, :1].argmax(-1)
    inside = np.arange(ROOM) < lengths[..., None]
    np.testing.assert_array_equal(tokens, np.where(inside, best, PAD))
    limits = (SOURCE != PAD).sum(1) + EXTRA
    for i in (0, 1, 3):
        last = tokens[i, 0, lengths[i, 0] - 1]
        assert last == EOS or lengths[i, 0] == limits[i]


@pytest.mark.slow
def test_lengths_follow_the_source_and_padded_rows_are_skipped():
    free = decode('transformer', SOURCE, Search('greedy', extra_len=EXTRA))
    lengths = free.lengths[:, 0]
    assert lengths[2] == 0
    assert not free.tokens[2].any()
    assert (lengths <= (SOURCE != PAD).sum(1) + EXTRA).all()
    short = decode('transformer', SOURCE, Search('greedy', extra_len=EXTRA, max_len=3))
    assert short.tokens.shape == (4, 1, 3)
    np.testing.assert_array_equal(short.tokens, free.tokens[..., :3])


@pytest.mark.slow
def test_what_is_drawn_hangs_on_the_key_alone():
    keys = jax.random.split(jax.random.key(3), 4)
    search = Search('sample', extra_len=EXTRA, temperature=2.0)
    drawn, again = (decode('additive', SOURCE, search, keys) for _ in range(2))
    order = np.array([3, 1, 2, 0])
    other = decode('additive', SOURCE[order], search, keys[order])
    np.testing.assert_array_equal(drawn.tokens, again.tokens)
    np.testing.assert_array_equal(drawn.tokens[order], other.tokens)
    colder = dataclasses.replace(search, temperature=1e-4)
    greedy = decode('additive', SOURCE, Search('greedy', extra_len=EXTRA))
    np.testing.assert_array_equal(decode('additive', SOURCE, colder, keys).tokens, greedy.tokens)
    assert (drawn.tokens != greedy.tokens).any()


def test_mistakes():
    with pytest.raises(UserError, match=r"unknown method .* 'bean'; .* 'beam'"):
        Search('bean')
    with pytest.raises(UserError, match=r'extra_len.*negative'):
        Search(extra_len=-1)
    with pytest.raises(UserError, match=r'max_len .* 1'):
        Search(max_len=0)
