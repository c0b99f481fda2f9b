"""Captions: a golden step, which are predicted in parallel, what is written, likelihoods."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.pictures import drawn

from vit_jax.errors import UserError
from vit_jax.models.cappa import Model
from vit_jax.nn.stochastic import example_positions
from vit_jax.ops.search import EOS
from vit_jax.step import bind, init_state, init_variables, make_train_step
from vit_jax.tasks.base import check_rows_are_separable
from vit_jax.tasks.caption import Task

MODEL = Model(
    **{'vocab_size': 7, 'length': 5, 'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 12},
    **{'num_heads': 2, 'decoder_depth': 1},
)
# Of the first three steps of Adam; they change only with the model, its initial values or the loss.
GOLDEN = [1.9459101, 1.9169717, 1.8624816]
CAPTIONS = [[3, 4, 6, 5, 2], [5, 3, 2, 0, 0], [6, 2, 0, 0, 0], [4, 4, 2, 0, 0]]


def make_batch():
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    return {'image': jnp.asarray(images), 'caption': jnp.array(CAPTIONS, jnp.int32)}


@pytest.fixture(scope='module')
def variables():
    images, ids = Task().inputs(make_batch())
    params = drawn(MODEL, images, ids)
    head = params['token_head']
    # So that captions end before all places are taken.
    return {'params': params | {'token_head': head | {'bias': head['bias'].at[EOS].add(1.0)}}}


def apply_of(variables, batch):
    return bind(MODEL, Task(), variables, batch)


def predicted(task, variables, batch):
    return jax.device_get(jax.jit(lambda v, b: task.predict(apply_of(v, b), b))(variables, batch))


@pytest.mark.slow
def test_golden_steps():
    task, tx, batch = Task(parallel=0.5), optax.adam(1e-2), make_batch()
    variables = jax.jit(lambda: init_variables(MODEL, task, batch, seed=0))()
    state = init_state(variables, tx, 0, ema=False)
    step, losses = jax.jit(make_train_step(MODEL, task, tx)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses == pytest.approx(GOLDEN, rel=1e-4)
    assert set(metrics) >= {'loss', 'causal_loss', 'parallel_loss'}


def test_an_example_is_drawn_alike_in_every_part_of_a_batch():
    task, key = Task(), jax.random.key(3)
    batch = {'image': jnp.zeros((2000, 1, 1, 3))}
    whole = np.asarray(task.augment(key, batch)['parallel'])
    assert 0.72 < whole.mean() < 0.78
    with example_positions(jnp.arange(500, 700)):
        part = task.augment(key, {'image': batch['image'][:200]})
    np.testing.assert_array_equal(part['parallel'], whole[500:700])
    assert (task.augment(jax.random.key(4), batch)['parallel'] != whole).any()
    assert task.inputs(part | {'caption': jnp.ones((200, 2), int)})[2] is part['parallel']
    assert Task(parallel=0.0).augment(key, batch) is batch


def test_a_loss_is_a_sum_over_captions_of_their_means():
    batch = make_batch() | {'parallel': jnp.array([True, False, False, True])}
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5, 7)), jnp.float32)
    check_rows_are_separable(Task(), {'logits': logits}, batch)
    found = Task().loss({'logits': logits}, batch | {'mask': jnp.array([1.0, 1, 1, 0])})
    every = -np.asarray(jax.nn.log_softmax(logits))
    means = [
        np.mean([row[i, token] for i, token in enumerate(ids) if token])
        for row, ids in zip(every, CAPTIONS, strict=True)
    ]
    assert float(found['loss'].sum) == pytest.approx(sum(means[:3]), rel=1e-5)
    assert float(found['causal_loss'].sum) == pytest.approx(means[1] + means[2], rel=1e-5)
    assert float(found['parallel_loss'].sum) == pytest.approx(means[0], rel=1e-5)
    assert [float(term.count) for term in found.values()] == [3, 1, 2]
    assert [term.weight for term in found.values()] == [1, 0, 0]


@pytest.mark.slow
def test_captions_that_greedy_search_writes_are_accurate(variables):
    """Those of two examples are replaced by what the model writes for them."""
    batch, task = make_batch(), Task(search='greedy')
    written = predicted(task, variables, batch)['tokens']
    ids = np.where([[1], [0], [1], [0]], written, batch['caption'])
    batch = batch | {'caption': jnp.asarray(ids)}
    sums = jax.jit(lambda v, b: task.evaluate(apply_of(v, b), b))(variables, batch)
    right = (ids == written).all(1).sum()
    assert 2 <= right < 4 and sums['caption_accuracy'] == (right, 4)
    assert sums['token_accuracy'][1] == (ids != 0).sum()


@pytest.mark.slow
def test_beams_find_captions_at_least_as_likely_and_padding_gets_none(variables):
    batch = make_batch() | {'mask': jnp.array([1.0, 1, 1, 0])}
    greedy = predicted(Task(search='greedy'), variables, batch)
    beams = predicted(Task(alpha=0.0, beams=3), variables, batch)
    assert (beams['score'][:3] >= greedy['score'][:3] - 1e-6).all()
    assert not beams['tokens'][3].any() and beams['tokens'].shape == (4, 5)
    images = Task().inputs(batch)[0]
    outputs = jax.jit(MODEL.apply)(variables, images)
    np.testing.assert_allclose(beams['features'], outputs['pre_logits'], atol=1e-6)


def test_prompts_have_the_likelihood_of_captions(variables):
    batch = make_batch()
    found = predicted(Task(prompts=tuple(map(tuple, CAPTIONS))), variables, batch)
    assert found.keys() == {'features', 'likelihood'}
    sums = np.asarray(found['likelihood']).diagonal()
    outputs = jax.jit(MODEL.apply)(variables, *Task().inputs(batch))
    terms = jax.jit(Task().loss)(outputs, batch)
    lengths = (np.array(CAPTIONS) != 0).sum(1)
    assert -(sums / lengths).sum() == pytest.approx(float(terms['loss'].sum), rel=1e-4)


def test_attention_is_that_of_a_caption_of_the_data_or_a_written_one(variables):
    batch, task = make_batch(), Task()
    apply = apply_of(variables, batch)
    _, ids = task.attention_inputs(apply, batch)
    np.testing.assert_array_equal(ids[:, 1:], batch['caption'][:, :-1])
    alone = {'image': batch['image']}
    ids = jax.jit(lambda v, b: task.attention_inputs(apply_of(v, b), b)[1])(variables, alone)
    written = predicted(Task(search='greedy'), variables, alone)['tokens']
    np.testing.assert_array_equal(ids[:, 1:], written[:, :-1])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'parallel': 1.5}, r'config.task.parallel=1.5: .* \[0, 1\]'),
        ({'search': 'sample'}, r"config.task.search=sample: .* 'beam' or 'greedy'"),
        ({'beams': 0}, r'config.task.beams=0: .* 1'),
        ({'mean': (0.5,)}, 'config.task.std'),
    ],
)
def test_invalid_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Task(**fields)


def test_batches_without_captions_are_refused():
    with pytest.raises(UserError, match=r"examples .* tokenize\('caption', 64\)"):
        Task().loss({'logits': jnp.zeros((4, 5, 7))}, {'image': make_batch()['image']})
