"""SigLIP 2: each loss is that of its own task, late losses wait, and the teacher is a copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import distilled_towers
from helpers.distilled_towers import HEADS, SHAPE, TEXTS, WORDS, Comparing, masks_of
from helpers.experiments import ROOT
from helpers.runs import metrics
from helpers.sections import optimizer, section, times

from vit_jax.config import load
from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.models import cappa, dinov2, siglip, vit
from vit_jax.models.siglip2 import TOWERS, Model
from vit_jax.ops import terms
from vit_jax.profiling import task_flops
from vit_jax.runtime import sharding
from vit_jax.step import (
    Optimizer,
    TrainApply,
    bind,
    init_state,
    init_variables,
    make_train_step,
    stream_keys,
)
from vit_jax.tasks import caption
from vit_jax.tasks import dinov2 as dinov2_task
from vit_jax.tasks import siglip as siglip_task
from vit_jax.tasks.siglip2 import DISTILLED, Task
from vit_jax.trainer.train import train

B = 8
MODEL = Model(**SHAPE, **TEXTS, **WORDS, embed_dim=8, decoder={'depth': 1}, prototypes=HEADS)
BATCH = distilled_towers.batch(B)
CAPTIONS = np.asarray(BATCH['caption'])
TOWER = dinov2.Backbone(**SHAPE, pool='map', positions={'std': 1.0})
VIEWS = {'image': BATCH['global_image'], 'local_image': BATCH['local_image']}
PARALLEL = jnp.arange(B) % 2 == 0
KEYS = stream_keys(jax.random.key(3), Task.rngs)


@functools.cache
def params():
    """Drawn so that no parameter is zero, with numbers of logits as at the start."""
    rng = np.random.default_rng(4)
    shapes = jax.eval_shape(lambda: init_variables(MODEL, Task(), BATCH, 0))['params']
    drawn = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype), shapes)
    return drawn | {'log_scale': jnp.float32(1.0), 'bias': jnp.float32(-1.0)}


def shifted(tree):
    return jax.tree.map(lambda x: x + 0.05, tree)


@jax.jit
def joined(params, teacher, batch):
    """Means and weighted loss of the joined task."""
    apply = TrainApply(MODEL, params, {}, KEYS, teacher, jnp.int32(0))
    task, batch = Task(), {**batch, 'parallel': PARALLEL}
    found = task.loss(task.outputs(apply, batch), batch)
    return terms.means(found), terms.total(found, terms.means(found))


@jax.jit
def alone(params, teacher, batch):
    """Means of every part's own task with its own model, and their weighted sum."""
    towers = siglip.Model(**SHAPE, **TEXTS, **WORDS, embed_dim=8)
    task = siglip_task.Task()
    made = towers.apply({'params': {k: params[k] for k in TOWERS}}, *task.inputs(batch))
    contrast = terms.means(task.loss(made, batch))

    captions = {**batch, 'parallel': PARALLEL}
    task = caption.Task(parallel=0.5)
    encoder = {name: params['image'][name] for name in cappa.ENCODER}
    writer = cappa.Model(**SHAPE, **WORDS, decoder_depth=1)
    made = writer.apply({'params': {**encoder, **params['captions']}}, *task.inputs(captions))
    written = terms.means(task.loss(made, captions))

    views = {'image': batch['global_image'], 'local_image': batch['local_image']}
    masks = masks_of(MODEL, params, views, KEYS)
    task = dinov2_task.Task(first_teacher_temp=0.07, koleo=0.0, ibot=0.25, mask_ratios=(0.5, 0.5))
    made = task.outputs(Comparing(params, teacher, masks, TOWER, 0, 'tanh'), views)
    distilled = terms.means(task.loss(made, views))
    both = contrast['loss'] + written['loss']
    return contrast, written, distilled, both + distilled['dino'] + 0.25 * distilled['ibot']


def test_every_term_is_that_of_its_own_task():
    means, loss = joined(params(), shifted(params()), BATCH)
    contrast, written, distilled, total = alone(params(), shifted(params()), BATCH)
    expected = {
        **{'contrast': contrast['loss'], 'captions': written['loss']},
        **{name: contrast[name] for name in ('right_text', 'right_image')},
        **{name: written[name] for name in ('parallel_loss', 'causal_loss')},
        **{name: distilled[name] for name in DISTILLED},
    }
    assert means.keys() == expected.keys()
    for name, value in expected.items():
        assert float(means[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), name
    assert float(loss) == pytest.approx(float(total), rel=1e-6)
    assert float(written['parallel_loss']) != pytest.approx(float(written['causal_loss']), rel=1e-3)


def test_losses_with_texts_see_whole_images_and_the_others_views():
    means, _ = joined(params(), shifted(params()), BATCH)
    for changed, same in (('image', ('dino', 'ibot')), ('global_image', ('contrast', 'captions'))):
        other, _ = joined(params(), shifted(params()), {**BATCH, changed: BATCH[changed][::-1]})
        for name in ('contrast', 'captions', 'dino', 'ibot'):
            assert (float(other[name]) == float(means[name])) == (name in same), (changed, name)


START = 2
LAYOUTS = {
    'one': (1, {}),
    'fsdp': (4, {'fsdp': 4, 'min_split_size': 8}),
    'pmap': (2, {'strategy': 'pmap'}),
}


@functools.cache
def program(name='one', accum_steps=1, task=Task(start=START)):  # noqa: B008  frozen
    """The layout, the initial state, and the compiled step."""
    devices, parallel = LAYOUTS[name]
    layout = sharding.make_layout(jax.devices()[:devices], Parallel(**parallel))
    delays = (('^(dino_head|ibot_head|mask)/', str(START)),)
    # Adam would divide gradients that are nearly zero by their own size.
    tx, _ = optimizer(params(), 5, name='sgd', lr=1e-2, lr_delays=delays)

    def init():
        return init_state({'params': params()}, tx, seed=0, ema=True)

    average = {'ema_decay': 0.9, 'ema_start': str(START), 'accum_steps': accum_steps}
    options = section(Step, **average)
    step = make_train_step(MODEL, task, Optimizer(tx, times=times(5)), options, layout)
    return layout, init, layout.compile_train(step, jax.eval_shape(init))


@functools.cache
def trained(*arguments, stop=None, steps=4):
    """States and metrics after each step, stopped and resumed before the step `stop`."""
    layout, init, step = program(*arguments)
    state, states = layout.create(init), []
    for k in range(steps):
        if k == stop:
            state = layout.from_global(jax.device_put(jax.device_get(layout.to_global(state))))
        batch = {name: x + (k / 4 if x.dtype == jnp.float32 else 0) for name, x in BATCH.items()}
        state, scores = step(state, layout.put_batch(batch))
        states.append(jax.device_get((layout.to_global(state), scores)))
    return states


def same(one, other):
    return all(map(np.array_equal, *map(jax.tree.leaves, (one, other))))


@pytest.mark.slow
def test_late_losses_wait_and_the_teacher_starts_as_a_copy_of_the_student():
    before = params()
    for k, (state, scores) in enumerate(trained()):
        late = [float(scores[name]) for name in DISTILLED]
        assert not any(late) if k < START else all(late)
        # The teacher of step START is the student before it.
        assert same(state.params, state.ema) == (k < START)
        for part in ('dino_head', 'ibot_head', 'mask'):
            assert same(state.params[part], before[part]) == (k < START), (k, part)
        assert not same(state.params['image'], before['image'])
        before = state.params


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit():
    for one, other in zip(trained(), trained(stop=START), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.long
def test_the_start_is_a_share_of_the_run(tmp_path):
    changes = ['total=4', 'every.log=1', 'every.eval=4', 'task.start=50%', 'step.ema_start=50%']
    train(load.load(f'{ROOT}/experiments/siglip2/scenes.py:smoke', changes), tmp_path)
    rows = [row for row in metrics(tmp_path) if 'train/dino' in row]
    assert [row['train/dino'] > 0 for row in rows] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.long
def test_before_its_start_a_loss_has_no_part_in_the_others():
    without = trained('one', 1, Task(dino=0.0, ibot=0.0), steps=START)
    for (state, scores), (expected, found) in zip(trained()[:START], without, strict=True):
        assert float(scores['loss']) == pytest.approx(float(found['loss']), rel=1e-6)
        towers = [{name: tree.params[name] for name in TOWERS} for tree in (state, expected)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *towers)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ('name', 'accum_steps'), [('one', 2), ('fsdp', 1), ('fsdp', 2), ('pmap', 1), ('pmap', 2)]
)
def test_every_layout_and_microbatch_trains_alike(name, accum_steps):
    for (_, found), (_, expected) in zip(trained(name, accum_steps), trained(), strict=True):
        found, expected = (jax.tree.map(float, scores) for scores in (found, expected))
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_late_losses_are_counted_once_and_cost_nothing_before_their_start():
    spec = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in BATCH.items()}
    waiting, always = (
        task_flops.training_flops(MODEL, Task(start=start), spec) for start in (START, '80%')
    )
    assert waiting == always
    towers = task_flops.training_flops(MODEL, Task(dino=0.0, ibot=0.0), spec)
    assert towers.averaged == 0 < always.averaged
    assert towers.learning < always.learning


def test_evaluation_needs_no_views():
    batch = {name: BATCH[name] for name in ('image', 'caption')}

    @jax.jit
    def evaluate(params):
        task = Task(captions=0.5)
        return task.evaluate(bind(MODEL, task, {'params': params}, batch), batch)

    means = {name: float(total / count) for name, (total, count) in evaluate(params()).items()}
    assert means.keys() == {'loss', 'contrast', 'captions', 'right_text', 'right_image'}
    assert means['loss'] == pytest.approx(means['contrast'] + 0.5 * means['captions'], rel=1e-6)
    apply = TrainApply(MODEL, params(), {}, KEYS, params(), jnp.int32(0))
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda: Task().outputs(apply, batch))
    assert 'global_image' in str(error.value) and 'local_image' in str(error.value)


@pytest.mark.parametrize(
    ('fields', 'key'),
    [({'dino': -1.0}, 'dino'), ({'parallel': 2.0}, 'parallel'), ({'sinkhorn': 0}, 'sinkhorn')],
)
def test_impossible_fields_are_refused(fields, key):
    with pytest.raises(UserError) as error:
        Task(**fields)
    assert f'task.{key}' in str(error.value)


def test_the_towers_are_a_siglip_with_the_same_embeddings():
    fields, names = MODEL.transferable()
    towers = siglip.Model(**{k: v for k, v in fields.items() if k != 'name'})
    inputs = BATCH['image'], BATCH['caption']
    expected = jax.eval_shape(towers.init, jax.random.key(0), *inputs)['params']
    mine = {name: params()[name] for name in names}
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, expected)
    assert params().keys() - mine.keys() == {'captions', 'dino_head', 'ibot_head', 'mask'}
    assert isinstance(MODEL.image_tower(), vit.Model)
