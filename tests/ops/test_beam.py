"""Beam search against one in plain Python and against all sequences; what a rule to stop keeps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy_decoder import EOS, log_prob, next_log_probs, step, table

from vit_jax.errors import UserError
from vit_jax.ops import search as search_lib

LEN = 8


@functools.cache
def compiled(step, **options):
    return jax.jit(
        lambda cache, max_lens: search_lib.beam_search(step, cache, max_lens=max_lens, **options)
    )


def search(cache, max_lens=None, step=step, max_len=LEN, **options):
    batch = len(cache['table'])
    limits = np.full(batch, max_len) if max_lens is None else np.asarray(max_lens)
    return jax.tree.map(np.asarray, compiled(step, max_len=max_len, **options)(cache, limits))


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def hypotheses(decoded, example):
    """[(tokens, score)] of an example, as long as they are there."""
    rows = zip(
        decoded.tokens[example], decoded.lengths[example], decoded.scores[example], strict=True
    )
    return [(row[:length].tolist(), score) for row, length, score in rows if score > -np.inf]


def assert_same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], rtol=1e-5)


def plain_search(cache, example, beams, limit, alpha, full=False):
    """The same search with lists, run to the limit, or until `beams` hypotheses have finished."""
    live, finished = [([], 0.0)], []
    for _ in range(limit):
        scored = [
            ([*prefix, token], total + gain)
            for prefix, total in live
            for token, gain in enumerate(next_log_probs(cache, example, prefix))
        ]
        scored.sort(key=lambda pair: -pair[1])
        finished += [
            (tokens, total / penalty(len(tokens), alpha))
            for tokens, total in scored[:beams]
            if tokens[-1] == EOS
        ]
        live = [pair for pair in scored if pair[0][-1] != EOS][:beams]
        if full and len(finished) >= beams:
            break
    finished.sort(key=lambda pair: -pair[1])
    cut = [(tokens, total / penalty(len(tokens), alpha)) for tokens, total in live]
    return [*finished[:beams], *cut][:beams]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('beams', 'alpha'),
    [
        (2, 0.6),
        (4, 2.0),
        pytest.param(4, 0.0, marks=pytest.mark.long),
        pytest.param(2, 0.0, marks=pytest.mark.long),
        pytest.param(2, 2.0, marks=pytest.mark.long),
        pytest.param(4, 0.6, marks=pytest.mark.long),
    ],
)
def test_the_search_is_that_in_plain_python(beams, alpha):
    cache, limits = table(24), np.arange(24) % (LEN + 1)
    found = {
        stop: search(cache, beams=beams, alpha=alpha, stop=stop, max_lens=limits)
        for stop in search_lib.STOPS
    }
    for i, limit in enumerate(limits):
        expected = plain_search(cache, i, beams, limit, alpha) if limit else []
        assert_same(hypotheses(found['all'], i), expected)
        assert_same(hypotheses(found['best'], i)[:1], expected[:1])
        full = plain_search(cache, i, beams, limit, alpha, full=True) if limit else []
        assert_same(hypotheses(found['full'], i), full)


@pytest.mark.slow
@pytest.mark.parametrize('alpha', [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_sequences(alpha):
    vocab, limit = 4, 4
    cache = table(3, vocab)
    decoded = search(cache, max_len=limit, beams=vocab**limit, alpha=alpha, stop='all')
    for i in range(3):
        ended, cut = {}, {}
        for tokens in itertools.product(range(vocab), repeat=limit):
            end = tokens.index(EOS) + 1 if EOS in tokens else limit
            score = log_prob(cache, i, tokens[:end]) / penalty(end, alpha)
            (ended if EOS in tokens else cut)[tokens[:end]] = score
        expected = [
            (list(tokens), kind[tokens])
            for kind in (ended, cut)
            for tokens in sorted(kind, key=lambda t, kind=kind: -kind[t])
        ]
        assert len(expected) == 40 + 81
        assert_same(hypotheses(decoded, i), expected)
        assert not decoded.tokens[i, len(expected) :].any()
        assert not decoded.lengths[i, len(expected) :].any()


@functools.cache
def greedy_decoded():
    limits = jnp.asarray(np.arange(64) % (LEN + 1))
    greedy = jax.jit(functools.partial(search_lib.greedy, step, max_len=LEN, max_lens=limits))
    return limits, jax.device_get(greedy(table(64)))


@pytest.mark.slow
@pytest.mark.parametrize('stop', search_lib.STOPS)
def test_one_beam_is_greedy(stop):
    limits, greedy = greedy_decoded()
    one = search(table(64), beams=1, alpha=0.6, stop=stop, max_lens=limits)
    np.testing.assert_array_equal(one.tokens, greedy.tokens)
    np.testing.assert_array_equal(one.lengths, greedy.lengths)
    np.testing.assert_allclose(one.scores, greedy.scores / penalty(greedy.lengths, 0.6), rtol=1e-6)


@pytest.mark.slow
def test_more_beams_find_better_hypotheses():
    cache = table(64)
    few, many = (search(cache, beams=beams).scores[:, 0] for beams in (2, 16))
    assert many.mean() > few.mean() + 0.01


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_scores_are_the_log_probabilities_of_the_tokens(dtype):
    cache = table(16)
    cache['table'] = cache['table'].astype(dtype)
    decoded = search(cache, beams=4, alpha=0.6)
    assert decoded.scores.dtype == np.float32
    for i in range(16):
        for tokens, score in hypotheses(decoded, i):
            expected = log_prob(cache, i, tokens) / penalty(len(tokens), 0.6)
            np.testing.assert_allclose(score, expected, rtol=1e-5)


def test_nothing_follows_eos_and_the_best_come_first():
    decoded = search(table(16), beams=4, alpha=0.6)
    ended = (decoded.tokens == EOS).any(axis=-1)
    assert ended.any() and (decoded.lengths < LEN).any()
    for tokens, length in zip(
        decoded.tokens.reshape(-1, LEN), decoded.lengths.ravel(), strict=True
    ):
        assert not tokens[length:].any() and EOS not in tokens[: length - 1]
        assert tokens[length - 1] == EOS or length == LEN or EOS not in tokens
    for scores, finished in zip(decoded.scores, ended, strict=True):
        assert sorted(scores[finished], reverse=True) == scores[finished].tolist()
        assert sorted(finished, reverse=True) == finished.tolist()


def test_a_finished_hypothesis_never_changes():
    cache, before = table(16), None
    for limit in range(1, LEN + 1):
        decoded = search(cache, beams=4, stop='all', max_lens=[limit] * 16)
        finished = [
            {tuple(tokens): score for tokens, score in hypotheses(decoded, i) if tokens[-1] == EOS}
            for i in range(16)
        ]
        for old, new in zip(before or [], finished, strict=bool(before)):
            for tokens, score in new.items():
                assert len(tokens) == limit or old[tokens] == score
            assert len(old) <= len(new)
            if len(old) == 4:
                assert min(old.values()) <= min(new.values())
        before = finished
    assert any(len(one) == 4 for one in before)


@pytest.mark.slow
@pytest.mark.parametrize('stop', search_lib.STOPS)
def test_an_example_depends_on_its_own_row_only(stop):
    cache, limits = jax.device_get(table(6)), np.array([8, 0, 3, 8, 1, 8])
    whole = search(cache, beams=3, stop=stop, max_lens=limits)
    for i in range(6):
        row, limit = jax.tree.map(lambda x, i=i: x[i : i + 1], (cache, limits))
        alone = search(row, beams=3, stop=stop, max_lens=limit)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i : i + 1]), alone, whole)
    assert not whole.tokens[1].any() and (whole.scores[1] == -np.inf).all()


@pytest.mark.slow
def test_equal_scores_are_ordered_by_prefix_and_token():
    cache = table(1)
    cache['table'] = jnp.zeros_like(cache['table'])
    decoded = search(cache, beams=3, max_len=2, alpha=0.0, stop='all')
    assert decoded.tokens.tolist() == [[[EOS, 0], [0, EOS], [0, 0]]]


STEPS: list[int] = []


def counted(cache, tokens, position):
    jax.debug.callback(lambda p: STEPS.append(int(p)), position)
    return step(cache, tokens, position)


def count_steps(cache, **options):
    STEPS.clear()
    search(cache, step=counted, beams=4, max_len=40, **options)
    jax.effects_barrier()
    return len(STEPS)


@pytest.mark.slow
def test_the_search_stops_early():
    cache = table(8)
    cache['table'] = cache['table'].at[..., EOS].add(3.0)
    steps = {stop: count_steps(cache, stop=stop) for stop in search_lib.STOPS}
    assert steps['full'] < steps['all'] < 40 and steps['best'] < steps['all']
    assert count_steps(cache, stop='all', max_lens=[0] * 8) == 0
    assert count_steps(cache, stop='all', max_lens=[2, 1] * 4) == 2


def with_source(cache, tokens, position, *, touched):
    """A step that also reads an encoded source, and may hand it back changed."""
    source = cache['source']
    logits, cache = step(cache, tokens, position)
    return logits + source[:, :1], {**cache, 'source': source + 1 if touched else source}


def traffic(size, **options):
    """Bytes that the compiled search reads and writes, where a source has so many numbers."""
    cache = {**table(3), 'source': jnp.zeros((3, size))}
    search = functools.partial(
        search_lib.beam_search, functools.partial(with_source, **options), beams=4, max_len=LEN
    )
    return jax.jit(search).lower(cache).compile().cost_analysis()['bytes accessed']


@pytest.mark.slow
def test_what_the_step_leaves_alone_is_not_moved():
    size = 100_000
    still, touched = (traffic(size, touched=x) - traffic(1, touched=x) for x in (False, True))
    # Sources of three examples are read once and written once, for all of the four beams.
    assert still == pytest.approx(4 * size * (3 + 3 * 4), rel=0.01)
    assert touched > 2 * still


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ({'beams': 0}, r'beams .* 1, not 0'),
        ({'max_len': 0}, r'max_len .* 1'),
        ({'alpha': -0.1}, 'alpha.*0'),
        ({'stop': 'ful'}, "did you mean 'full'"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(UserError, match=words):
        search(table(1), **{'beams': 2, **options})
