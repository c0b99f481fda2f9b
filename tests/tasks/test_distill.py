"""Distillation: the teacher's targets, its images, and runs with a model that is never trained."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.pictures import count, images_like, shapes, spec

import vit_jax
from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.inference import frozen
from vit_jax.inference.load import open_model
from vit_jax.models import projected, vit
from vit_jax.ops.sequences import to_range
from vit_jax.profiling import cost, flops, task_flops
from vit_jax.tasks import distill
from vit_jax.tasks.base import FrozenModel
from vit_jax.trainer import build, train
from vit_jax.tree_paths import param_paths

FILE = f'{ROOT}/experiments/distill/cifar10.py'
TEACHER = f'{ROOT}/experiments/distill/smoke_teacher.npz'
SMALL = ('model.width=8', 'model.depth=1', 'model.mlp_dim=16', 'task.mixup=0.5')
LAYOUTS = {
    'one': (1, {}, 1),
    'accumulation': (1, {}, 2),
    'pmap': (4, {'strategy': 'pmap'}, 2),
    'fsdp': (4, {'fsdp': 4, 'min_split_size': 64}, 1),
    'slices': (4, {'slices': 2}, 1),
}


def drawn_logits(seed, rows=4, classes=5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, classes)), jnp.float32)


def softmax(x):
    e = np.exp(np.float64(x) - np.float64(x).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_soft_targets_are_the_divergence_of_big_vision():
    student, teacher = drawn_logits(0), drawn_logits(1)
    p, q = softmax(teacher / 3), softmax(student / 3)
    expected = 9 * (p * (np.log(p) - np.log(q))).sum(-1)
    np.testing.assert_allclose(distill.soft(student, teacher, 3.0), expected, rtol=1e-5)
    np.testing.assert_allclose(distill.soft(student, student, 0.5), 0, atol=1e-6)


def test_hard_targets_and_directions():
    student, teacher = drawn_logits(0), drawn_logits(1)
    expected = -np.log(softmax(student))[np.arange(4), teacher.argmax(-1)]
    np.testing.assert_allclose(distill.hard(student, teacher, 1.0), expected, rtol=1e-5)
    norms = np.linalg.norm(student, axis=-1) * np.linalg.norm(teacher, axis=-1)
    cosines = (student * teacher).sum(-1) / norms
    np.testing.assert_allclose(distill.features(student, teacher, 1.0), 1 - cosines, rtol=1e-4)


@pytest.mark.parametrize(
    ('own', 'other'),
    [
        ({}, FrozenModel(None, (8, 8), None, ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))),
        ({'mean': (0.4,) * 3, 'std': (0.2,) * 3}, FrozenModel(None, None, (0.0, 1.0))),
    ],
)
def test_the_teacher_sees_the_images_in_its_own_range_and_size(own, other):
    task = distill.Task(**own)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8))
    view = task.teacher_view(other, *task.inputs({'image': images}))
    expected = to_range(images, other.value_range or (-1, 1), other.normalization)
    np.testing.assert_allclose(view, expected, atol=1e-5)
    wide = other._replace(size=(12, 16))
    larger = task.teacher_view(wide, *task.inputs({'image': images}))
    assert larger.shape == (2, 12, 16, 3)


def test_each_token_of_deit_has_its_teacher():
    task = distill.Task(target='hard', weight=0.5, label_weight=0.5)
    outputs = {'class_logits': drawn_logits(0), 'distillation_logits': drawn_logits(1)}
    outputs = {**outputs, 'logits': drawn_logits(2), 'teacher': drawn_logits(3)}
    label = np.array([0, 1, 2, 4], np.int32)
    batch = {'label': jnp.asarray(label)}
    terms = task.loss(outputs, batch)
    logs = {name: np.log(softmax(x)) for name, x in outputs.items()}
    rows, said = np.arange(4), outputs['teacher'].argmax(-1)
    assert float(terms['labels'].sum) == pytest.approx(-logs['class_logits'][rows, label].sum())
    expected = -logs['distillation_logits'][rows, said].sum()
    assert float(terms['distill'].sum) == pytest.approx(expected)
    assert (terms['labels'].weight, terms['distill'].weight) == (0.5, 0.5)
    without = task.loss({k: outputs[k] for k in outputs if k != 'teacher'}, batch)
    assert without.keys() == {'labels', 'accuracy'}


@pytest.mark.long
@pytest.mark.slow
def test_its_cost_is_inspected_and_timed(capsys):
    """A frozen teacher counts forward once."""
    words = ['--config', f'{FILE}:smoke', *(f'--config.{text}' for text in SMALL)]
    assert main(['inspect', *words, '--json']) == 0
    counted = json.loads(capsys.readouterr().out)['flops']
    trained = open_model(TEACHER)
    teacher = flops.forward_flops(trained.model, jnp.zeros((1, 8, 8, 1)))
    student = counted['forward'] - teacher
    assert counted['train'] == 3 * student + teacher
    assert main(['benchmark', *words, '--steps', '2']) == 0
    assert re.search(r'\btrain\b', capsys.readouterr().out)


def built(name='one', *given):
    devices, parallel, microbatches = LAYOUTS[name]
    config = load.load(f'{FILE}:smoke', [*SMALL, *given])
    with config.unlocked():
        config.parallel = parallel
        config.step = dict(config.get('step', {}), accum_steps=microbatches)
    return build.build(config, jax.devices()[:devices])


@pytest.fixture(scope='module')
def one():
    return stepped('one')


def stepped(name):
    """The teacher, and parameters and metrics after two steps."""
    training = built(name)
    program, batches = training.program, training.data.train_batches()
    state = program.layout.create(program.init, {}, program.frozen.variables)
    for _ in range(2):
        state, metrics = program.train_step(state, program.layout.put_batch(next(batches)))
    state = jax.tree.map(np.asarray, program.layout.to_global(state))
    return state, {key: float(value) for key, value in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [pytest.param(n, marks=pytest.mark.long) for n in ('pmap', 'accumulation', 'fsdp', 'slices')],
)
def test_any_layout_trains_like_one_device(name, one):
    (expected, numbers), (state, found) = one, stepped(name)
    assert found == pytest.approx(numbers, rel=1e-5)
    for path, value in param_paths(expected.params).items():
        ours = param_paths(state.params)[path]
        np.testing.assert_allclose(ours, value, rtol=1e-5, atol=2e-6, err_msg=path)


@pytest.mark.slow
def test_the_teacher_stays_and_moves_the_student(one):
    state, numbers = one
    stored = param_paths(open_model(TEACHER).params)
    for path, value in param_paths(state.frozen['teacher']['params']).items():
        np.testing.assert_array_equal(value, stored[path])
    assert numbers['loss'] == pytest.approx(numbers['distill']) != numbers['labels']
    moments = {name for name in param_paths(state.opt_state) if 'teacher' in name}
    assert not moments


@pytest.mark.slow
def test_a_teacher_costs_its_forward_pass():
    training = built()
    program, data = training.program, training.data.spec
    counted = task_flops.training_flops(program.model, program.task, data)
    image = spec(1, 8, 8, 1)
    student, teacher = (
        flops.forward_flops(model, image) for model in (program.model, open_model(TEACHER).model)
    )
    assert counted == (student, teacher)
    assert cost.price(training.config).train == 3 * student + teacher


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """A run of twenty steps, and the same one stopped after ten and resumed; with its teacher."""
    base = tmp_path_factory.mktemp('distill')
    shutil.copy(TEACHER, base / 'teacher.npz')
    config = load.load(f'{FILE}:smoke', [*SMALL, f'task.teacher={base}/teacher.npz'])
    device = jax.devices()[:1]
    train.train(config, base / 'whole', devices=device)
    for stop_at in (10, None):
        try:
            train.train(config, base / 'parts', stop_at=stop_at, devices=device)
        except train.Preempted:
            assert stop_at == 10
    return base, config


@pytest.mark.slow
@pytest.mark.usefixtures('compiled_once')
def test_a_run_resumes_bit_for_bit_without_a_saved_teacher(finished):
    base, _ = finished
    whole, parts = (
        checkpointer.load_variables(base / name / 'checkpoints') for name in ('whole', 'parts')
    )
    for path, value in param_paths(whole[1]['params']).items():
        np.testing.assert_array_equal(value, param_paths(parts[1]['params'])[path])
    stored = frozen.attach(distill.Task(teacher=TEACHER))
    assert parts[2]['frozen'] == dict(stored.digests) and len(parts[2]['frozen']['teacher']) == 32
    saved = (base / 'parts' / 'checkpoints' / '20').rglob('*')
    assert not [path for path in saved if 'frozen' in path.name]


@pytest.mark.slow
def test_another_teacher_is_refused_on_resume(finished):
    base, _ = finished
    shutil.copytree(base / 'parts', base / 'other')
    (base / 'other' / 'result.json').unlink()
    arrays = dict(np.load(TEACHER))
    arrays['head/bias'] = arrays['head/bias'] + 1
    np.savez(base / 'changed.npz', **arrays)
    config = load.load(f'{FILE}:smoke', [*SMALL, f'task.teacher={base}/changed.npz'])
    (base / 'other' / 'config.json').write_text(load.to_json(config))
    with pytest.raises(UserError, match=r'config.task.teacher=.*changed.npz: .*weights'):
        train.train(config, base / 'other', devices=jax.devices()[:1])


@pytest.mark.slow
def test_a_student_is_a_teacher_and_a_classifier(finished):
    base, _ = finished
    held = frozen.attach(distill.Task(teacher=str(base / 'whole')))
    model = held.task.frozen_models['teacher']
    assert (model.size, model.value_range) == ((8, 8), (-1.0, 1.0))
    assert held.class_names['teacher'][3] == '3'
    held.require_classes(tuple(map(str, range(10))))
    with pytest.raises(UserError, match="class 0 is '0'"):
        held.require_classes(('zero', *map(str, range(1, 10))))
    network, variables = vit_jax.load(base / 'whole')
    outputs = jax.jit(network.apply)(variables, images_like(1, 8, 8, 1))
    assert outputs['logits'].shape == (1, 10)


def test_a_projected_vit():
    fields = {'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
    plain, model = vit.Model(3, **fields), projected.Model(3, **fields, projection=5)
    params = shapes(model, (8, 8))
    assert count(params) == count(shapes(plain, (8, 8))) + 8 * 5 + 5
    outputs, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), spec(2, 8, 8, 3))
    assert outputs['projected'].shape == (2, 5)
    keywords, parts = model.transferable()
    assert vit.Model(**{k: v for k, v in keywords.items() if k != 'name'}) == plain
    assert set(parts) == set(params) - {'projection'}
    with pytest.raises(UserError, match=r'projection .* 1, not 0'):
        projected.Model(projection=0)


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (['task.teacher='], 'config.task.teacher'),
        (['task.teacher=nothing.npz'], 'config.task.teacher=nothing.npz.*no such file'),
        (
            ['model.num_classes=12'],
            r"target='soft'.*\(10,\).*\(12,\)",
        ),
        (['task.target=features', 'model.width=16'], "model.name='projected' with projection=8"),
        (['task.target=sharp'], "unknown config.task.target 'sharp'"),
        (['task.temperature=0'], 'config.task.temperature=0.0'),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(UserError, match=message):
        task_flops_of(built('one', *given))


def task_flops_of(training):
    program = training.program
    return task_flops.training_flops(program.model, program.task, training.data.spec)


def test_a_step_without_the_teacher_is_refused():
    task = dataclasses.replace(distill.Task(teacher=TEACHER))
    with pytest.raises(UserError, match=r'config.task.teacher'):
        task_flops.training_flops(vit.Model(3, 4, 8, 1, 16, 2), task, built().data.spec)
