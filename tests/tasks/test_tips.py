"""TIPS: each loss is that of its own task, on all patches; the teacher's heads are averages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import distilled_towers
from helpers.distilled_towers import HEADS as SIZES
from helpers.distilled_towers import SHAPE, TEXTS, WORDS, Comparing, masks_of
from helpers.sections import optimizer, section, times

from vit_jax.config.run import Step
from vit_jax.errors import UserError
from vit_jax.models import tips
from vit_jax.models.tips_student import TOWERS, Model
from vit_jax.ops import terms
from vit_jax.ops.self_distillation import CropMasks
from vit_jax.step import (
    Optimizer,
    TrainApply,
    bind,
    init_state,
    init_variables,
    make_train_step,
    stream_keys,
)
from vit_jax.tasks import dinov2 as dinov2_task
from vit_jax.tasks import siglip as siglip_task
from vit_jax.tasks.siglip2 import DISTILLED
from vit_jax.tasks.tips import HEADS, Task, everywhere

B = 6
FIELDS = {**SHAPE, **TEXTS, **WORDS, 'embed_dim': 8}
MODEL = Model(**FIELDS, prototypes=SIZES)
BATCH = {**distilled_towers.batch(B), 'long': distilled_towers.captions(B, 1)}
KEYS = stream_keys(jax.random.key(3), Task.rngs)
TASKS = {'v2': Task(second_text='long'), 'v1': Task(visible=False, average='all')}


@functools.cache
def params():
    """Drawn so that no parameter is zero, with the logits' scale as at the start."""
    rng = np.random.default_rng(4)
    shapes = jax.eval_shape(lambda: init_variables(MODEL, TASKS['v2'], BATCH, 0))['params']
    drawn = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype), shapes)
    return drawn | {'log_scale': jnp.float32(1.0)}


@functools.partial(jax.jit, static_argnums=3)
def joined(params, teacher, batch, task):
    """Means and weighted loss of the joined task."""
    apply = TrainApply(MODEL, params, {}, KEYS, teacher, jnp.int32(0))
    found = task.loss(task.outputs(apply, batch), batch)
    return terms.means(found), terms.total(found, terms.means(found))


@functools.partial(jax.jit, static_argnums=3)
def alone(params, average, batch, version):
    """Means of every part's own task with its own model, and their weighted sum."""
    towers, task = tips.Model(**FIELDS), siglip_task.Task(loss_name='softmax')
    variables = {'params': {k: params[k] for k in TOWERS}}
    made = towers.apply(variables, *task.inputs(batch))
    first = terms.means(task.loss(made, batch))
    tokens = MODEL.image_tower().apply({'params': params['image']}, task.inputs(batch)[0])['tokens']
    second_image = tokens[:, 1] / jnp.linalg.norm(tokens[:, 1], axis=-1, keepdims=True)
    texts = towers.apply(variables, batch['long'], method='embed_texts')
    second = terms.means(task.loss({**made, 'image': second_image, 'text': texts}, batch))

    views = {'image': batch['global_image'], 'local_image': batch['local_image']}
    masks = masks_of(MODEL, params, views, KEYS)
    teacher = average
    if version == 'v2':
        masks = CropMasks(masks.hidden, jnp.tile(jnp.arange(16), (B, 1)), jnp.full((B, 16), 1 / 16))
        teacher = {**params, **{name: average[name] for name in HEADS}}
    task = dinov2_task.Task(first_teacher_temp=0.07, koleo=0.0, ibot=2.0, mask_ratios=(0.5, 0.5))
    tower = MODEL.image_tower()  # a class token and a register before the patches
    made = task.outputs(Comparing(params, teacher, masks, tower, 2, 'erf'), views)
    distilled = terms.means(task.loss(made, views))
    texts = (first['loss'] + second['loss']) / 2 if version == 'v2' else first['loss']
    return first, second, distilled, texts + distilled['dino'] + 2 * distilled['ibot']


@pytest.mark.parametrize('version', ['v2', pytest.param('v1', marks=pytest.mark.long)])
def test_every_term_is_that_of_its_own_task(version):
    average = jax.tree.map(lambda x: x + 0.05, params())
    means, loss = joined(params(), average, BATCH, TASKS[version])
    first, second, distilled, total = alone(params(), average, BATCH, version)
    expected = {'contrast': first['loss'], **{name: distilled[name] for name in DISTILLED}}
    expected |= {name: first[name] for name in ('right_text', 'right_image')}
    if version == 'v2':
        expected['second_contrast'] = second['loss']
        names = ('right_text', 'right_image')
        expected |= {f'second_{name}': second[name] for name in names}
    assert means.keys() == expected.keys()
    for name, value in expected.items():
        assert float(means[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    assert float(loss) == pytest.approx(float(total), rel=1e-6)


def test_all_patches_count_alike_and_the_same_ones_stay_hidden():
    hidden = jnp.arange(12).reshape(2, 2, 3) % 2 == 0
    found = everywhere(CropMasks(hidden, jnp.zeros((2, 1), int), jnp.ones((2, 1))))
    np.testing.assert_array_equal(found.hidden, hidden)
    np.testing.assert_array_equal(found.places, [[0, 1, 2, 3, 4, 5]] * 2)
    np.testing.assert_allclose(found.weights.sum(1), 2)  # crops


@functools.cache
def trained(accum_steps=1, stop=None, steps=3):
    """States and metrics after each step, stopped and resumed before the step `stop`."""
    # Adam would divide gradients that are nearly zero by their own size.
    tx, _ = optimizer(params(), 5, name='sgd', lr=1e-3)
    state = init_state({'params': params()}, tx, seed=0, ema=True)
    options = section(Step, ema_decay=0.9, accum_steps=accum_steps)
    step = jax.jit(make_train_step(MODEL, TASKS['v2'], Optimizer(tx, times=times(5)), options))
    states = []
    for k in range(steps):
        if k == stop:
            state = jax.device_put(jax.device_get(state))
        batch = {name: x + (k / 4 if x.dtype == jnp.float32 else 0) for name, x in BATCH.items()}
        state, scores = step(state, batch)
        states.append(jax.device_get((state, scores)))
    return states


@pytest.mark.slow
@pytest.mark.long
def test_a_resumed_run_is_the_same_bit_for_bit():
    for one, other in zip(trained(), trained(stop=1), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.long
def test_microbatches_train_alike():
    for (_, found), (_, expected) in zip(trained(2), trained(), strict=True):
        found, expected = (jax.tree.map(float, scores) for scores in (found, expected))
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_evaluation_needs_neither_views_nor_second_captions():
    batch = {name: BATCH[name] for name in ('image', 'caption')}
    task = TASKS['v2']

    @jax.jit
    def evaluate(params):
        return task.evaluate(bind(MODEL, task, {'params': params}, batch), batch)

    means = {name: float(total / count) for name, (total, count) in evaluate(params()).items()}
    assert means.keys() == {'loss', 'contrast', 'right_text', 'right_image'}
    assert means['loss'] == means['contrast']


@pytest.mark.parametrize(
    ('fields', 'key'),
    [({'average': 'some'}, 'average'), ({'second_text': 'caption'}, 'second_text')],
)
def test_impossible_fields_are_refused(fields, key):
    with pytest.raises(UserError) as error:
        Task(**fields)
    assert f'task.{key}' in str(error.value)


def test_the_towers_are_a_tips_with_the_same_embeddings():
    fields, names = MODEL.transferable()
    towers = tips.Model(**{k: v for k, v in fields.items() if k != 'name'})
    inputs = BATCH['image'], BATCH['caption']
    expected = jax.eval_shape(towers.init, jax.random.key(0), *inputs)['params']
    mine = {name: params()[name] for name in names}
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, expected)
    assert params().keys() - mine.keys() == {*HEADS, 'mask'}


def test_a_second_caption_needs_a_second_class_token():
    model = Model(**FIELDS, prototypes=SIZES, registers=0)
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda: init_variables(model, TASKS['v2'], BATCH, 0))
    assert 'registers' in str(error.value) and 'second_text' in str(error.value)


def test_towers_of_different_widths_are_refused():
    with pytest.raises(UserError) as error:
        Model(**{**FIELDS, 'text_width': 4})
    assert 'texts.width=4' in str(error.value)
