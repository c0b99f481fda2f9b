"""DINOv2's losses: numbers of the authors' code, invariances, and the state of a run."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.applies import Given
from helpers.pictures import images_like
from helpers.sections import optimizer, section, times
from helpers.xla import compiled_both_ways

from vit_jax.config.run import Step
from vit_jax.errors import UserError
from vit_jax.models import dinov2, vit
from vit_jax.ops import resize, self_distillation, terms
from vit_jax.runtime import sharding
from vit_jax.step import Optimizer, TrainApply, init_state, init_variables, make_train_step
from vit_jax.tasks import base
from vit_jax.tasks import dinov2 as dinov2_task
from vit_jax.tasks._views import fold, unfold
from vit_jax.tasks.base import FrozenModel
from vit_jax.tasks.dinov2 import COPY, GRAM, Task

B, G, L, K, N, D = 6, 2, 3, 16, 9, 8
# A student of DINOv3.
MODEL = dinov2.Model(
    **{'patch_size': 2, 'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
    **{'registers': 2, 'no_bias': ('key',), 'gelu': 'erf', 'layer_scale': 0.1, 'norm_eps': 1e-5},
    **{'posemb': 'none', 'positions': 'rope_dinov3'},
    **{'prototypes': 6, 'patch_prototypes': 5, 'hidden': 8, 'bottleneck': 4, 'patch_bottleneck': 4},
)
BATCH = {'image': images_like(B, G, 8, 8, 3), 'local_image': images_like(B, L, 4, 4, 3, seed=1)}
MASK = {'mask': jnp.ones(B)}


@functools.cache
def drawn():
    """Outputs drawn at random, of which the authors' code has computed the losses."""
    rng = np.random.default_rng(0)
    shapes = [(B, G, K), (B, G + L, K), (B, G, N, K), (B, G, N, K)]
    teacher, student, patches, guessed = (
        rng.normal(size=shape).astype(np.float32) for shape in shapes
    )
    hidden = rng.random((B, G, N)) < 0.4
    hidden[:, 1] = False
    weights = np.where(hidden, 1 / hidden.sum(-1, keepdims=True).clip(1), 0).reshape(B, G * N)
    return {
        'teacher': teacher,
        'student': student,
        'teacher_patches': patches.reshape(B, G * N, K),
        'student_patches': guessed.reshape(B, G * N, K),
        'patch_weights': weights.astype(np.float32),
        'features': rng.normal(size=(B, G, D)).astype(np.float32),
        'teacher_temp': np.float32(0.07),
    }


@functools.partial(jax.jit, static_argnums=0)
def _means(task, outputs, batch):
    return terms.means(task.loss(outputs, batch))


def means(outputs, batch=MASK, **keywords):
    return jax.tree.map(float, _means(Task(**keywords), outputs, batch))


def test_the_losses_are_those_of_the_authors_code():
    """Three losses of facebookresearch/dinov2 (b8931f7), as its trainer adds them."""
    found = means(drawn())
    assert found['dino'] == pytest.approx(18.781046, rel=1e-5)
    assert found['ibot'] == pytest.approx(9.657700, rel=1e-5)
    assert found['koleo'] == pytest.approx(-0.0971925, rel=1e-4)
    made = []
    jax.eval_shape(lambda outputs: made.append(Task().loss(outputs, MASK)), drawn())
    weights = {name: term.weight for name, term in made[0].items()}
    metrics = {'target_entropy': 0.0, 'usage_entropy': 0.0}
    assert weights == {'dino': 1.0, 'ibot': 1.0, 'koleo': 0.1, **metrics}


def changed(**arrays):
    return {**drawn(), **arrays}


def test_only_hidden_patches_count():
    hidden = drawn()['patch_weights'][..., None] > 0
    for name in ('teacher_patches', 'student_patches'):
        same = changed(**{name: np.where(hidden, drawn()[name], 5.0).astype(np.float32)})
        assert means(same) == pytest.approx(means(drawn()), rel=1e-5)
        other = changed(**{name: np.where(hidden, drawn()[name][::-1], drawn()[name])})
        assert abs(means(other)['ibot'] - means(drawn())['ibot']) > 1e-2


def test_the_order_of_examples_does_not_matter_and_their_pairing_does():
    order = np.random.default_rng(2).permutation(B)
    shuffled = jax.tree.map(lambda x: x[order] if x.ndim else x, drawn())
    assert means(shuffled) == pytest.approx(means(drawn()), rel=1e-5)
    mixed = means(changed(student=drawn()['student'][order]))
    assert abs(mixed['dino'] - means(drawn())['dino']) > 1e-2


def test_the_order_of_local_crops_does_not_matter_and_that_of_global_ones_pairs_them():
    student = drawn()['student']
    local = changed(student=student[:, [0, 1, 4, 2, 3]])
    assert means(local) == pytest.approx(means(drawn()), rel=1e-5)
    swapped = means(changed(student=student[:, [1, 0, 2, 3, 4]]))
    assert abs(swapped['dino'] - means(drawn())['dino']) > 1e-2


def test_padding_has_no_part():
    mask = np.array([1, 1, 1, 1, 0, 0], np.float32)
    noise = jax.tree.map(
        lambda x: (
            np.where(np.arange(B).reshape(-1, *[1] * (x.ndim - 1)) < 4, x, 7 * x + 1)
            if x.ndim
            else x
        ),
        drawn(),
    )
    noise['patch_weights'] = drawn()['patch_weights']
    assert means(noise, {'mask': mask}) == pytest.approx(means(drawn(), {'mask': mask}), rel=1e-5)
    assert means(noise)['dino'] != pytest.approx(means(drawn())['dino'], rel=1e-2)


@pytest.mark.slow
def test_what_all_rows_have_in_common_is_no_target():
    shift = np.linspace(-1, 1, K, dtype=np.float32)
    shifted = means(changed(teacher=drawn()['teacher'] + shift))
    assert shifted['dino'] == pytest.approx(means(drawn())['dino'], rel=1e-4)
    used = means(drawn(), sinkhorn=20)
    assert used['usage_entropy'] == pytest.approx(np.log(K), abs=0.02)
    assert used['target_entropy'] < used['usage_entropy'] - 1


@pytest.mark.slow
def test_rows_are_coupled():
    with pytest.raises(AssertionError, match='couples the rows'):
        base.check_rows_are_separable(Task(), drawn(), MASK)


@functools.cache
def params():
    rng = np.random.default_rng(4)  # not initial values, which make all class tokens alike
    shapes = jax.eval_shape(lambda: init_variables(MODEL, Task(), BATCH, 0))['params']
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype), shapes)


def outputs(step=0, seed=0, ema=None, batch=BATCH):
    """Those of training, for a student without dropped paths."""
    keys = {name: jax.random.key(seed) for name in Task.rngs}
    return _outputs(keys, params() if ema is None else ema, batch, jnp.int32(step))


@jax.jit
def _outputs(keys, ema, batch, step):
    apply = TrainApply(MODEL, params(), {}, keys, ema, step)
    return Task(warmup=4).outputs(apply, batch)


@pytest.mark.slow
def test_a_teacher_that_is_the_student_agrees_with_it_but_for_hidden_patches():
    found = outputs()
    assert found['teacher'].shape == (B, G, 6) and found['student'].shape == (B, G + L, 6)
    assert found['teacher_patches'].shape == found['student_patches'].shape == (B, 8, 5)
    alike = np.isclose(found['teacher'], found['student'][:, :G], atol=1e-5).all(-1)
    np.testing.assert_array_equal(alike.sum(1), 1)  # one crop of each image has hidden patches
    far = np.abs(found['teacher_patches'] - found['student_patches']).max(-1)
    assert (far[found['patch_weights'] > 0] > 1e-4).all()
    other = outputs(ema=jax.tree.map(lambda x: x + 0.1, params()))
    assert not np.isclose(other['teacher'], found['teacher'], atol=1e-3).any(-1).all()


def test_masks_belong_to_the_step_and_the_example():
    weights = [outputs(seed=seed)['patch_weights'] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).any() and (weights[0][0] != weights[0][1]).any()


def test_the_temperature_of_the_teacher_rises_with_the_step():
    found = [float(outputs(step)['teacher_temp']) for step in (0, 1, 4, 9)]
    assert found == pytest.approx([0.04, 0.0475, 0.07, 0.07])
    sharp, soft = (means(changed(teacher_temp=np.float32(t))) for t in (0.04, 0.07))
    assert sharp['target_entropy'] < soft['target_entropy']


def test_a_second_image_is_a_further_global_crop():
    split = {'image': BATCH['image'][:, :1], 'second_image': BATCH['image'][:, 1:]}
    found = outputs(batch={**split, 'local_image': BATCH['local_image']})
    for name, expected in outputs().items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


TEN = Task(warmup=2, gram=2.0, gram_start=3, gram_teacher='average', gram_refresh=4)
LARGE = images_like(B, G, 16, 16, 3, seed=2)


@functools.cache
def program(way):
    """The layout, the initial state, and the step, compiled once for each `way`."""
    layout = sharding.make_layout(jax.devices()[:1])
    options = {'weight_decay': 0.1, 'lr_delays': (('/prototypes/', '2'),)}
    tx, _ = optimizer(params(), 10, name='adamw', lr=1e-2, **options)

    def init():
        return init_state({'params': params()}, tx, seed=0, ema=True, snapshot=TEN.snapshot)

    average = {'ema_decay': 0.9, 'ema_schedule': {'name': 'cosine', 'final': 1.0}}
    step = make_train_step(MODEL, TEN, Optimizer(tx, times=times(10)), section(Step, **average))
    return layout, init, layout.compile_train(step, jax.eval_shape(init))


def batch_of(step):
    """The batch of a step."""
    return {name: x + step / 8 for name, x in {**BATCH, 'large_image': LARGE}.items()}


@functools.cache
def trained(stop=None, way='fast'):
    """States and metrics after each of ten steps, stopped and resumed before the step `stop`."""
    layout, init, step = program(way)
    state, states = layout.create(init), []
    for k in range(10):
        if k == stop:
            state = layout.from_global(jax.device_put(jax.device_get(layout.to_global(state))))
        state, metrics = step(state, layout.put_batch(batch_of(k)))
        states.append(jax.device_get((layout.to_global(state), metrics)))
    return states


# Model, losses, Sinkhorn-Knopp and Gram teacher of facebookresearch/dinov3 (6876159) with PyTorch's
# AdamW, from these parameters with these masks; heads with weight normalization, as in DINOv2.
AUTHORS = {
    'dino': [
        *(2.083422, 2.044103, 2.02089, 1.962175, 1.909258),
        *(1.870376, 1.846145, 1.830161, 1.821576, 1.817155),
    ],
    'ibot': [
        *(1.743375, 1.621601, 1.485165, 1.334472, 1.132509),
        *(0.825723, 0.895298, 0.833642, 0.815013, 0.824173),
    ],
    'koleo': [
        *(8.166786, 6.640918, 5.501073, 4.820299, 4.054929),
        *(3.492868, 3.452194, 2.825526, 2.87068, 2.117382),
    ],
    'gram': [0, 0, 0, 0.517091, 0.513511, 0.503181, 0.460357, 0.404244, 0.339772, 0.27818],
    'loss': [
        *(4.643476, 4.329796, 4.056163, 4.812858, 4.474283),
        *(4.051748, 4.007376, 3.754843, 3.6032, 3.409426),
    ],
}


@pytest.mark.slow
@compiled_both_ways
def test_ten_steps_are_the_authors(way):
    for k, (_, metrics) in enumerate(trained(way=way)):
        for name, values in AUTHORS.items():
            assert float(metrics[name]) == pytest.approx(values[k], rel=1e-5, abs=2e-6), (k, name)


@pytest.mark.slow
def test_the_gram_teacher_is_the_average_at_its_steps():
    """Taken before step 3, and again before step 7, without the heads."""
    states = [state for state, _ in trained()]
    for k, state in enumerate(states):
        taken = {3: 2, 7: 6}.get(max(t for t in (0, 3, 7) if t <= k))
        held = states[taken].ema if taken else params()
        assert not {'dino_head', 'ibot_head'} & state.other_emas[COPY].keys()
        for name, tree in state.other_emas[COPY].items():
            jax.tree.map(np.testing.assert_array_equal, tree, held[name])
    assert [float(metrics['gram']) > 0 for _, metrics in trained()] == [False] * 3 + [True] * 7


@pytest.mark.slow
@pytest.mark.long
def test_student_and_teachers_are_one_state_that_resumes_exactly():
    for one, other in zip(trained(), trained(stop=5), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@jax.jit
def distance(one, other):
    return optax.tree.norm(optax.tree.sub(one, other))


@pytest.mark.slow
def test_the_last_layer_waits_and_the_teacher_follows():
    states = [params(), *(state.params for state, _ in trained())]
    heads = [state['dino_head'] for state in states]
    moved = [
        float(distance(new[part], old[part]))
        for part in ('prototypes', 'fc1')
        for old, new in itertools.pairwise(heads)
    ]
    assert moved[:2] == [0, 0] and min(moved[2:]) > 1e-4
    for state, _ in trained():
        zeros = jax.tree.map(np.zeros_like, state.params)
        assert 0 < distance(state.params, state.ema) < distance(state.params, zeros)


FIELDS, ENCODER = MODEL.transferable()
VIT = vit.Model(**{key: value for key, value in FIELDS.items() if key != 'name'})
ANCHORED = Task(gram=2.0).with_frozen({GRAM: FrozenModel(VIT, None, (-1.0, 1.0))})


def student(weights):
    keys = {name: jax.random.key(0) for name in Task.rngs}
    return TrainApply(MODEL, weights, {}, keys, weights, jnp.int32(0))


@jax.jit
def anchored(weights, encoder, batch):
    """Outputs of a student that has a Gram teacher."""
    apply = student(weights)
    apply.frozen = ANCHORED.bind_frozen({GRAM: {'params': encoder}})
    return ANCHORED.outputs(apply, batch)


@jax.jit
def moved(weights):
    """The Gram loss between crops with and without hidden patches."""
    apply, crops = student(weights), fold(BATCH['image'])
    masks = apply(BATCH['image'], method='block_masks', masked=1, ratios=(0.1, 0.5))
    hidden, whole = apply(crops, masked=fold(masks.hidden)), apply(crops)
    return unfold(self_distillation.gram(hidden['patches'], whole['patches']), B)


def encoder():
    return {name: params()[name] for name in ENCODER}


@pytest.mark.slow
def test_the_anchor_pulls_only_where_similarities_changed():
    """Its teacher is the student: similarities differ where a crop has hidden patches alone."""
    found, each = anchored(params(), encoder(), BATCH), np.asarray(moved(params()))
    np.testing.assert_array_equal((each > 1e-6).sum(1), 1)
    np.testing.assert_allclose(found['gram'], each.mean(1), rtol=1e-4)
    made, mask = [], {'mask': jnp.asarray([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])}
    jax.eval_shape(lambda outputs: made.append(ANCHORED.loss(outputs, mask)), found)
    assert made[0]['gram'].weight == 2.0
    mean = np.asarray(found['gram'])[:4].mean()
    assert float(_means(ANCHORED, found, mask)['gram']) == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_the_anchor_sees_the_same_crops_in_twice_the_size():
    large = jax.ShapeDtypeStruct((B, 2, 16, 16, 3), jnp.float32)
    resized, _ = MODEL.resize_params(jax.device_get(encoder()), (8, 8), (16, 16))
    made = jax.eval_shape(anchored, params(), resized, {**BATCH, 'large_image': large})
    assert made['gram'].shape == (B,)
    few = jax.ShapeDtypeStruct((B, 1, 16, 16, 3), jnp.float32)
    with pytest.raises(UserError, match='large_image'):
        jax.eval_shape(anchored, params(), resized, {**BATCH, 'large_image': few})


@pytest.mark.slow
def test_a_copy_of_the_average_replaces_a_file():
    """Here both see what the student sees, with other parameters."""
    task = dataclasses.replace(ANCHORED, gram_start=2, gram_refresh=3)
    task = task.with_frozen(ANCHORED.frozen_models)
    assert (task.snapshot.first, task.snapshot.every) == (5, 3)
    weights = {GRAM: encoder(), COPY: jax.tree.map(lambda x: 2 * x + 0.1, encoder())}

    @jax.jit
    def found(step, file, copy):
        apply = student(params())
        apply.step, apply.frozen = step, task.bind_frozen({GRAM: {'params': file}})
        apply.frozen[COPY] = task.snapshot.bind(MODEL, {'params': copy})
        return task.outputs(apply, BATCH)['gram']

    losses = [found(step, *weights.values()) for step in (1, 2, 4, 5, 6)]
    file, copy = (found(4, tree, tree) for tree in weights.values())
    assert not np.asarray(losses[0]).any() and (np.abs(file - copy) > 1e-3).any()
    for loss, expected in zip(losses[1:], (file, file, copy, copy), strict=True):
        np.testing.assert_allclose(loss, expected, atol=1e-6)


def test_features_are_resized_as_by_pytorch():
    features = np.asarray(images_like(2, 24, 3))
    maps = [resize.bicubic_half_pixel(x.reshape(6, 4, 3), (3, 2)) for x in features]
    found = jax.jit(dinov2_task.resize_features, static_argnums=(1, 2))(features, (6, 4), (3, 2))
    np.testing.assert_allclose(found, np.reshape(maps, (2, 6, 3)), atol=1e-5)


def test_evaluation_is_of_whole_images():
    scores = np.random.default_rng(3).normal(size=(2, K)).astype(np.float32)
    tokens = images_like(2, 1 + N, D)
    made = {'scores': jnp.asarray(scores), 'patches': tokens[:, 1:], 'pre_logits': tokens[:, 0]}
    batch = {'image': images_like(2, 6, 6, 3), 'mask': jnp.asarray([1.0, 0.0])}
    probs = np.asarray(jax.nn.softmax(scores / 0.07))
    sums = jax.jit(lambda batch: Task().evaluate(Given(lambda image: made), batch))(batch)
    entropy = -(probs[0] * np.log(probs[0].clip(1e-30))).sum()
    loss = -(probs[0] * np.asarray(jax.nn.log_softmax(scores / 0.1))[0]).sum()
    np.testing.assert_allclose(sums['entropy'], (entropy, 1), rtol=1e-4)
    np.testing.assert_allclose(sums['loss'], (loss, 1), rtol=1e-4)
    assert 'patches' not in Task().predict(Given(lambda image: made), batch)
    found = Task(patches=True).predict(Given(lambda image: made), batch)
    np.testing.assert_array_equal(found['prototype'], scores.argsort()[:, :-4:-1])
    np.testing.assert_allclose(found['probability'], -np.sort(-probs)[:, :3], rtol=1e-5)
    np.testing.assert_array_equal(found['patches'], tokens[:, 1:])
    np.testing.assert_array_equal(found['features'], tokens[:, 0])


@pytest.mark.parametrize(
    ('keywords', 'message'),
    [
        ({'teacher_temp': 0.0}, 'config.task.teacher_temp=0.0: must be positive'),
        ({'sinkhorn': 0}, r'config.task.sinkhorn=0: .* 1'),
        ({'mask_ratios': (0.5, 0.1)}, r'mask_ratios=\(0.5, 0.1\):'),
        ({'masked': 3}, 'config.task.masked=3: .*2 global'),
        ({'gram': -1.0}, r'config.task.gram=-1.0: .* 0'),
        ({'gram_refresh': -1}, r'config.task.gram_refresh=-1: .* 0'),
        ({'gram_negatives': 'dropped'}, "unknown config.task.gram_negatives 'dropped'"),
        ({'std': (0.2,)}, 'config.task.std=.*: must be positive, and given with mean'),
    ],
)
def test_mistakes(keywords, message):
    with pytest.raises(UserError, match=message):
        Task(**keywords).loss(drawn(), MASK)


def test_a_single_crop_is_refused():
    one = {**drawn(), 'student': drawn()['student'][:, :1]}
    with pytest.raises(UserError, match=r"config.data.transforms: .*views\('image', 2"):
        Task().loss(one, MASK)
