"""The loss of translation, what it is a mean over, and what is decoded."""

import functools

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.applies import Given

from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import rnn_seq2seq, seq2seq
from vit_jax.ops import terms
from vit_jax.ops.search import BOS, EOS, PAD
from vit_jax.runtime import sharding
from vit_jax.step import bind, init_state, init_variables, make_train_step
from vit_jax.tasks.translate import Task, shift_right, smoothed_loss

VOCAB = 9
TARGET = np.array([[5, 6, EOS, PAD], [4, EOS, PAD, PAD], [8, 7, 6, EOS], [PAD] * 4], np.int32)
SOURCE = np.array(
    [[4, 5, EOS, PAD, PAD], [4, 8, 7, 6, EOS], [5, EOS, PAD, PAD, PAD], [PAD] * 5], np.int32
)
BATCH = {
    'source': SOURCE,
    'target': TARGET,
    'index': np.arange(4, dtype=np.int32),
    'mask': np.array([1, 1, 1, 0], np.float32),
}
REAL = TARGET != PAD
MODELS = {
    'post': seq2seq.Model(VOCAB, width=16, depth=1, num_heads=2, mlp_dim=16, dropout=0.0),
    'pre': seq2seq.Model(
        VOCAB, width=16, depth=1, num_heads=2, mlp_dim=16, dropout=0.0, norm='pre'
    ),
    'lstm': rnn_seq2seq.Model(VOCAB, width=8, embed_dim=8),
}


def make_logits(seed=0):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(4, 4, VOCAB)), jnp.float32)


def log_probs(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.cache
def variables_of(name):
    """Far enough from the initial ones for the tokens to differ in probability."""
    init = functools.partial(init_variables, MODELS[name], Task(), seed=0)
    variables = jax.device_get(jax.jit(init)(as_arrays(BATCH)))
    rng = np.random.default_rng(0)
    return as_arrays(
        jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype('f'), variables)
    )


def as_arrays(batch):
    return jax.tree.map(jnp.asarray, batch)


def test_the_decoder_reads_the_target_shifted_right():
    source, target_in = Task().inputs(as_arrays(BATCH))
    np.testing.assert_array_equal(source, SOURCE)
    np.testing.assert_array_equal(target_in[0], [BOS, 5, 6, EOS])
    np.testing.assert_array_equal(target_in[2], [BOS, 8, 7, 6])
    np.testing.assert_array_equal(shift_right(jnp.asarray([[4]])), [[BOS]])


@pytest.mark.parametrize('smoothing', [0.0, 0.1, 0.5])
def test_smoothing_spreads_eps_over_the_other_tokens(smoothing):
    wanted = np.full((4, 4, VOCAB), smoothing / (VOCAB - 1))
    np.put_along_axis(wanted, TARGET[..., None], 1 - smoothing, axis=-1)
    expected = -(wanted * log_probs(make_logits())).sum(-1)
    found = smoothed_loss(make_logits(), jnp.asarray(TARGET), smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    means = terms.means(Task(smoothing).loss({'logits': make_logits()}, as_arrays(BATCH)))
    assert float(means['loss']) == pytest.approx(expected[REAL].mean(), rel=1e-5)
    at_target = np.take_along_axis(log_probs(make_logits()), TARGET[..., None], -1)[..., 0]
    assert float(means['nll']) == pytest.approx(-at_target[REAL].mean(), rel=1e-5)


def test_large_logits_stay_exact():
    logits = make_logits() * 1e4
    found = smoothed_loss(logits, jnp.asarray(TARGET), 0.1)
    wanted = optax.smooth_labels(jax.nn.one_hot(TARGET, VOCAB), 0.1 * VOCAB / (VOCAB - 1))
    expected = optax.softmax_cross_entropy(logits, wanted)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_sums_of_an_evaluation():
    right = np.asarray(jax.nn.one_hot(TARGET, VOCAB)) * 20
    right[0, 1] = -right[0, 1]  # one token wrong, and all padding too
    right[~REAL] = np.eye(VOCAB)[8] * 20
    sums = Task().evaluate(Given(lambda *_: {'logits': jnp.asarray(right)}), as_arrays(BATCH))
    assert [float(x) for x in sums['token_accuracy']] == [8.0, 9.0]
    assert [float(x) for x in sums['sequence_accuracy']] == [2.0, 3.0]
    total, count = sums['loss']
    at_target = np.take_along_axis(log_probs(right), TARGET[..., None], -1)[..., 0]
    assert float(total) == pytest.approx(-at_target[REAL].sum(), rel=1e-5)
    assert int(count) == 9


@pytest.mark.fault(111)
def test_logits_that_are_not_finite_have_no_accuracy_and_padding_has_no_part():
    for place, is_nan in (((0, 1), True), ((0, 3), False)):
        logits = make_logits().at[place].set(jnp.nan)
        sums = Task().evaluate(Given(lambda *_, x=logits: {'logits': x}), as_arrays(BATCH))
        assert np.isnan(sums['token_accuracy'][0]) == is_nan
        assert np.isnan(sums['sequence_accuracy'][0]) == is_nan


def test_perplexity_is_of_the_mean():
    assert Task().derive({'loss': 2.0}) == {'perplexity': pytest.approx(np.exp(2.0))}
    assert Task().derive({'loss': 1e4}) == {'perplexity': np.inf}


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param('pre', marks=pytest.mark.long), 'lstm'])
def test_rows_of_padding_count_nowhere(name):
    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(variables, batch):
        outputs = MODELS[name].apply(variables, *Task().inputs(batch), train=False)
        return terms.means(Task().loss(outputs, batch))['loss']

    grads = functools.partial(loss_and_grads, variables_of(name))
    whole = grads(as_arrays(BATCH))
    for leaf in jax.tree.leaves(whole):
        assert np.isfinite(leaf).all()
    without = grads(as_arrays({k: x[:3] for k, x in BATCH.items()}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), whole, without)
    empty = grads(as_arrays({k: np.zeros_like(x) for k, x in BATCH.items()}))
    for leaf in jax.tree.leaves(empty):
        np.testing.assert_array_equal(leaf, 0)


def split_step(accum_steps, layout=None):
    model, tx = MODELS['post'], optax.sgd(1.0)
    state = init_state(dict(variables_of('post')), tx, 0, ema=False)
    make = functools.partial(make_train_step, model, Task(), tx)
    return state, make(Step(accum_steps=accum_steps), layout)


def updated(accum_steps=1):
    state, step = split_step(accum_steps)
    state, metrics = jax.jit(step)(state, as_arrays(BATCH))
    return state.params, metrics


@pytest.mark.slow
@pytest.mark.long
def test_microbatches_and_devices_count_by_their_tokens():
    params, metrics = updated()
    devices = jax.devices()[:2]
    state, step = split_step(2, sharding.make_layout(devices, Parallel(strategy='pmap')))
    pairs = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), BATCH)
    replicas = flax.jax_utils.replicate(state, devices)
    shared, of_devices = jax.pmap(step, 'batch', devices=devices)(replicas, pairs)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, jax.tree.map(lambda x: x[1], shared.params), params)
    for key in ('loss', 'nll', 'token_accuracy'):
        assert float(of_devices[key][0]) == pytest.approx(float(metrics[key]), rel=1e-5)


def predicted(name, task):
    """What a task decodes of the sources."""

    variables = variables_of(name)  # kept for other tests, so made outside of the program

    @jax.jit
    def predict(batch):
        return task.predict(bind(MODELS[name], task, variables, batch), batch)

    return predict(as_arrays(BATCH))


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', [pytest.param(x, marks=[pytest.mark.long] * (x == 'pre')) for x in MODELS]
)
def test_sequences_are_right_just_where_greedy_decoding_writes_them(name):
    task = Task(search='greedy', extra_len=0)
    tokens = np.asarray(predicted(name, task)['tokens'])
    assert tokens.shape == SOURCE.shape and not tokens[3].any()
    target = np.where(np.arange(4)[:, None] == 1, TARGET, 0)[:, :4]
    target[0, :] = tokens[0, :4]  # what it writes itself, whether or not that has ended

    variables = variables_of(name)

    @jax.jit
    def evaluate(batch):
        return task.evaluate(bind(MODELS[name], task, variables, batch), batch)

    total, count = evaluate(as_arrays(BATCH | {'target': target}))['sequence_accuracy']
    pairs = [(t[t > 0], w[: (t > 0).sum()]) for t, w in zip(target, tokens, strict=True)]
    written = [np.array_equal(*pair) for pair in pairs]
    assert written[0]
    assert (float(total), float(count)) == (sum(written[:3]), 3.0)


@pytest.mark.slow
def test_beams_of_the_config_are_searched():
    tasks = (Task(beams=6, alpha=0.0), Task(beams=1, alpha=0.0), Task(search='greedy'))
    wide, narrow, greedy = (predicted('post', task) for task in tasks)
    np.testing.assert_array_equal(narrow['tokens'], greedy['tokens'])
    assert (wide['score'] >= narrow['score'])[:3].all()
    assert (wide['score'] > narrow['score'])[:3].any()


@pytest.mark.parametrize(
    ('keywords', 'message'),
    [
        ({'label_smoothing': 1.0}, r'config.task.label_smoothing=1.0: .* \[0, 1\)'),
        ({'search': 'bean'}, "did you mean 'beam'"),
        ({'search': 'sample'}, "'beam' or 'greedy'"),
        ({'beams': 0}, 'beams=0.*1'),
        ({'alpha': -1.0}, 'alpha=-1.0.*0'),
        ({'extra_len': -1}, 'extra_len.*negative'),
    ],
)
def test_mistakes(keywords, message):
    with pytest.raises(UserError, match=message):
        Task(**keywords)
