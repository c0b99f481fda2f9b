"""Greedy decoding and sampling: the most probable, the right frequencies, filters as elsewhere."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers.toy_decoder import EOS, log_prob, next_log_probs, step, table

from vit_jax.errors import UserError
from vit_jax.ops import search

LEN = 6
keep_top_k = jax.jit(search.keep_top_k, static_argnums=1)
keep_top_p = jax.jit(search.keep_top_p, static_argnums=1)


def keys(batch, seed=0):
    fold = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
    return fold(jax.random.key(seed), np.arange(batch))


@functools.cache
def compiled(function, **options):
    return jax.jit(functools.partial(function, step, **options))


def decode(function, cache, *args, max_lens=None, **options):
    batch = len(cache['table'])
    limits = np.full(batch, options['max_len']) if max_lens is None else np.asarray(max_lens)
    return jax.tree.map(np.asarray, compiled(function, **options)(cache, *args, max_lens=limits))


def check_form(decoded, limits):
    """One eos at most, at the end; padding after it; nothing beyond the limit."""
    for tokens, lengths, limit in zip(decoded.tokens, decoded.lengths, limits, strict=True):
        for row, length in zip(tokens, lengths, strict=True):
            assert length <= limit
            assert not row[length:].any()
            assert EOS not in row[: max(length - 1, 0)]
            assert row[length - 1] == EOS or length in (0, limit)


def test_greedy_takes_the_most_probable_token():
    cache, limits = table(32), np.arange(32) % (LEN + 1)
    decoded = decode(search.greedy, cache, max_len=LEN, max_lens=limits)
    check_form(decoded, limits)
    for i, limit in enumerate(limits):
        prefix: list[int] = []
        while len(prefix) < limit and EOS not in prefix:
            prefix.append(int(np.argmax(next_log_probs(cache, i, prefix))))
        assert decoded.tokens[i, 0, : len(prefix)].tolist() == prefix
        assert decoded.lengths[i, 0] == len(prefix)
        expected = log_prob(cache, i, prefix) if limit else -np.inf
        np.testing.assert_allclose(decoded.scores[i, 0], expected, rtol=1e-5)
    assert {1, LEN} <= set(decoded.lengths[:, 0])


def test_of_equal_tokens_the_lowest_wins():
    cache = table(1)
    cache['table'] = jnp.zeros_like(cache['table']).at[..., EOS:].set(1.0)
    assert decode(search.greedy, cache, max_len=3).tokens.tolist() == [[[EOS, 0, 0]]]


def probabilities(cache, length, warp):
    """Of every sequence of `length` tokens or of fewer and eos, each step's logits warped."""
    result = {}
    for tokens in itertools.product(range(5), repeat=length):
        end = tokens.index(EOS) + 1 if EOS in tokens else length
        result[tokens[:end]] = np.exp(log_prob(cache, 0, tokens[:end], warp))
    return result


def reference_warp(temperature=1.0, top_k=5, top_p=1.0):
    def warp(logits):
        logits = logits / temperature
        order = np.argsort(-logits)
        p = np.exp(logits[order]) / np.exp(logits).sum()
        allowed = np.where(np.arange(5) < top_k, p, 0.0)
        kept = np.cumsum(allowed / allowed.sum()) - allowed / allowed.sum() < top_p
        dropped = order[~(kept & (np.arange(5) < top_k))]
        logits = logits.copy()
        logits[dropped] = -np.inf
        return logits

    return warp


@pytest.mark.slow
@pytest.mark.parametrize(
    'options',
    [
        {},
        *(pytest.param(x, marks=pytest.mark.long) for x in ({'temperature': 0.5}, {'top_k': 3})),
        {'top_p': 0.7},
        {'temperature': 2.0, 'top_k': 4, 'top_p': 0.8},
    ],
)
def test_samples_have_the_frequencies_of_the_model(options):
    cache, draws = table(1, scale=1.0), 20_000
    many = jax.tree.map(lambda x: np.repeat(x, draws, axis=0), cache)
    decoded = decode(search.sample, many, keys(draws), max_len=2, **options)
    check_form(decoded, [2] * draws)
    expected = probabilities(cache, 2, reference_warp(**options))
    assert sum(expected.values()) == pytest.approx(1.0)
    drawn = [
        tuple(row[0, :n].tolist())
        for row, (n,) in zip(decoded.tokens, decoded.lengths, strict=True)
    ]
    assert {tokens for tokens in drawn if expected[tokens] == 0} == set()
    likely = [tokens for tokens, p in expected.items() if p * draws >= 5]
    observed = np.array([drawn.count(tokens) for tokens in likely])
    hoped = np.array([expected[tokens] for tokens in likely])
    rare = draws - observed.sum()
    test = scipy.stats.chisquare(observed, hoped / hoped.sum() * (draws - rare))
    assert rare < 100 and test.pvalue > 0.001
    scores = [log_prob(cache, 0, tokens) for tokens in drawn[:50]]
    np.testing.assert_allclose(decoded.scores[:50, 0], scores, rtol=1e-5)


@pytest.mark.slow
def test_a_cold_sample_is_greedy():
    cache = table(16)
    cold = decode(search.sample, cache, keys(16), max_len=LEN, temperature=1e-4)
    one = decode(search.sample, cache, keys(16), max_len=LEN, top_k=1)
    nucleus = decode(search.sample, cache, keys(16), max_len=LEN, top_p=1e-6)
    best = decode(search.greedy, cache, max_len=LEN)
    for decoded in (cold, one, nucleus):
        jax.tree.map(np.testing.assert_array_equal, decoded, best)


@pytest.mark.slow
def test_a_sample_depends_on_its_own_row_only():
    cache, all_keys, limits = jax.device_get(table(6)), keys(6), np.array([6, 0, 3, 6, 1, 6])
    whole = decode(search.sample, cache, all_keys, max_len=LEN, max_lens=limits)
    check_form(whole, np.asarray(limits))
    for i in range(6):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], (cache, all_keys, limits))
        alone = decode(search.sample, row[0], row[1], max_len=LEN, max_lens=row[2])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i : i + 1]), alone, whole)
    other = decode(search.sample, cache, keys(6, seed=1), max_len=LEN, max_lens=limits)
    assert (other.tokens != whole.tokens).any()


def random_logits():
    return np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32) * 3


@pytest.mark.parametrize('k', [1, 5, 49, 50, 80])
def test_top_k_is_that_of_transformers(k):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    logits = random_logits()
    expected = transformers.TopKLogitsWarper(k)(None, torch.from_numpy(logits))
    np.testing.assert_array_equal(keep_top_k(logits, k), expected)


@pytest.mark.parametrize('p', [0.01, 0.3, 0.7, 0.95, 0.999])
def test_top_p_is_that_of_transformers(p):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    logits = random_logits()
    expected = transformers.TopPLogitsWarper(p)(None, torch.from_numpy(logits))
    result = np.asarray(keep_top_p(logits, p))
    np.testing.assert_array_equal(result, expected)
    assert len({int(n) for n in np.isfinite(result).sum(axis=-1)}) > (1 if p > 0.01 else 0)


def test_the_whole_distribution_is_kept_by_p_of_one():
    logits = np.repeat(np.array([[0.0, -30.0]] * 2, np.float32), [3, 1000], axis=1)
    np.testing.assert_array_equal(keep_top_p(logits, 1.0), logits)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ({'max_len': 0}, r'max_len .* 1, not 0'),
        ({'temperature': 0.0}, 'temperature.*0'),
        ({'top_k': 0}, 'top_k.*1'),
        ({'top_p': 0.0}, 'top_p.*0'),
        ({'top_p': 1.5}, 'at most 1, not 1.5'),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(UserError, match=words):
        search.sample(step, table(1), keys(1), **{'max_len': 3, **options})
