"""Self-distillation goes from training to pictures without one change of the package.

`helpers/self_distillation` has a student that sees crops of two sizes, a teacher that is its
average, and a loss that couples the rows of the whole global batch.
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.applies import Given
from helpers.runs import digest, metrics, read_item, steps
from helpers.self_distillation.models import dino as models
from helpers.self_distillation.tasks.dino import Task
from helpers.xla import use_one_device
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.inference import load as inference
from vit_jax.models import vit
from vit_jax.ops import terms
from vit_jax.profiling import task_flops
from vit_jax.step import TrainApply, init_variables
from vit_jax.tasks import base
from vit_jax.trainer import build
from vit_jax.trainer.loop import Preempted

# `test_outside_system.py` takes one system through the same commands in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures('compiled_once')]

HOME = pathlib.Path(__file__).parent / 'helpers' / 'self_distillation'
CONFIG = f'{HOME}/experiments/digits.py:smoke'
MODEL = models.Model(8, patch_size=2, width=8, depth=1, num_heads=2, hidden=8, bottleneck=4)


@pytest.fixture(scope='module')
def folders(tmp_path_factory, compiled_once):
    """A finished run of one device, and one that was stopped halfway and resumed."""
    whole, resumed = (tmp_path_factory.mktemp('runs') / name for name in ('whole', 'resumed'))
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        vit_jax.train(CONFIG, whole)
        with pytest.raises(Preempted):
            vit_jax.train(CONFIG, resumed, stop_at=6)
        vit_jax.train(CONFIG, resumed)
    return whole, resumed


@pytest.fixture(scope='module')
def run(folders):
    return folders[0]


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Files of another size than the model sees."""
    folder, pixels = tmp_path_factory.mktemp('photos'), np.zeros((2, 24, 24), np.uint8)
    pixels[0, 4:20, 10:14] = pixels[1, 4:8, 6:18] = 255
    for image, name in zip(pixels, ('one', 'bar'), strict=True):
        Image.fromarray(image).save(folder / f'{name}.png')
    return [str(folder / 'one.png'), str(folder / 'bar.png')]


def mine(run):
    return ['--workdir', str(run), '--allow', 'helpers.self_distillation']


def test_it_stays_small():
    lines = [len(file.read_text().splitlines()) for file in HOME.rglob('*.py')]
    assert sum(lines) < 200


def test_the_teacher_follows_the_student_and_comes_to_rest(run):
    saved = [run / 'checkpoints' / str(step) for step in (6, 12)]
    teachers = [read_item(path / 'variables')['params'] for path in saved]
    assert not np.array_equal(*(t['encoder']['norm']['bias'] for t in teachers))
    lines = metrics(run)
    assert {'test/entropy', 'knn/knn_accuracy'} <= lines[-1].keys()
    assert all(np.isfinite(line['train/loss']) for line in lines if 'train/loss' in line)


def test_a_resumed_run_is_the_same_bit_for_bit(folders):
    whole, resumed = folders
    assert steps(resumed)[-1] == 12
    assert digest(resumed) == digest(whole)
    assert metrics(resumed)[-1] == metrics(whole)[-1]


def test_evaluate(run):
    found = vit_jax.evaluate(run, allowed=['helpers.self_distillation'])
    expected = json.loads((run / 'result.json').read_text())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert expected['knn/knn_accuracy'] > 0.15  # 0.1 is chance


def test_predict_with_a_picture(run, photos, tmp_path, capsys):
    words = [*mine(run), '--out', str(tmp_path / 'patches.png'), '--json', *photos]
    assert cli.main(['predict', *words]) == 0
    images = json.loads(capsys.readouterr().out.splitlines()[-1])['images']
    best = [image['predictions'][0] for image in images]
    assert all(0 < row['probability'] <= 1 and row['prototype'] in range(16) for row in best)
    with Image.open(tmp_path / 'patches.png') as picture:
        assert len(picture.convert('RGB').getcolors(1 << 24)) > 20  # patches have colors


def test_attention(run, photos, tmp_path, capsys):
    words = [*mine(run), '--out', str(tmp_path / 'attention.png'), photos[0]]
    assert cli.main(['attention', *words]) == 0
    assert '1 layers x 2 heads, 4 x 4 patches' in capsys.readouterr().out
    assert (tmp_path / 'attention.png').read_bytes().startswith(b'\x89PNG')


def test_views_of_the_data(tmp_path):
    out = tmp_path / 'data.png'
    assert cli.main(['data', '--config', CONFIG, '--batches', '1', '--out', str(out)]) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


@pytest.mark.usefixtures('one_device')
def test_benchmark(tmp_path):
    out = tmp_path / 'numbers.json'
    assert cli.main(['benchmark', '--config', CONFIG, '--steps', '2', '--json', str(out)]) == 0
    found = json.loads(out.read_text())
    spec = {name: jax.ShapeDtypeStruct(*each) for name, each in found['example'].items()}
    total = 16 * task_flops.training_flops(*load.model_and_task(load.load(CONFIG)), spec).total
    assert found['train']['flops_per_sec'] * found['train']['step_sec'] == pytest.approx(total)


def test_what_others_load_of_it_is_a_vit_with_the_same_features(run):
    allowed = ['helpers.self_distillation']
    encoder, variables = vit_jax.load(run, allowed=allowed)
    assert isinstance(encoder, vit.Model)
    images = jnp.linspace(-1, 1, 64).reshape(1, 8, 8, 1)
    whole = inference.read(run, allowed=allowed)
    expected = jax.jit(whole.model.apply)(whole.variables, images)['pre_logits']
    found = jax.jit(encoder.apply)(variables, images)['pre_logits']
    np.testing.assert_allclose(found, expected, atol=1e-5)


# name: devices, config.parallel, microbatches
LAYOUTS = {
    'one': (1, {}, 1),
    'jit': (4, {}, 1),
    'pmap with accumulation': (4, {'strategy': 'pmap'}, 2),
    'jit with accumulation': (4, {}, 2),
    'pmap': (4, {'strategy': 'pmap'}, 1),
}
LONG = ('jit', 'jit with accumulation', 'pmap')


@functools.cache
def trained(name):
    """The metrics of the first steps, in the third of which the teacher is not the student."""
    devices, parallel, microbatches = LAYOUTS[name]
    config = load.load(CONFIG)
    config.parallel.update(parallel)
    if microbatches > 1:
        with config.unlocked():
            config.step.accum_steps = microbatches
    training = build.build(config, jax.devices()[:devices])
    program, batches, found = training.program, training.data.train_batches(), []
    state = program.layout.create(program.init)
    for _ in range(3):
        state, numbers = program.train_step(state, program.layout.put_batch(next(batches)))
        found.append({key: float(value) for key, value in numbers.items()})
    return found


@pytest.mark.parametrize(
    'name',
    [pytest.param(k, marks=pytest.mark.long if k in LONG else ()) for k in LAYOUTS if k != 'one'],
)
def test_one_device_and_four_train_alike(name):
    for step, expected in zip(trained(name), trained('one'), strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)


@functools.cache
def made():
    """Parameters, and a batch of two global and three local views."""
    rng = np.random.default_rng(0)
    batch = {
        'image': rng.normal(size=(6, 2, 8, 8, 1)),
        'local_image': rng.normal(size=(6, 3, 4, 4, 1)),
    }
    batch = {name: jnp.asarray(x, jnp.float32) for name, x in batch.items()}
    return jax.jit(lambda: init_variables(MODEL, Task(), batch, 0))()['params'], batch


@functools.partial(jax.jit, static_argnums=0)
def _loss(task, outputs, mask):
    return terms.means(task.loss(outputs, {'mask': mask}))['loss']


def loss(outputs, mask=(1,) * 6, **keywords):
    return float(_loss(Task(**keywords), outputs, jnp.asarray(mask, jnp.float32)))


@functools.cache
def outputs():
    """Those of a model without stochastic depth whose teacher is the student."""
    params, batch = made()
    model, keys = MODEL.clone(drop_path=0.0), {'dropout': jax.random.key(0)}

    @jax.jit
    def found(params):
        apply = TrainApply(model, params, {}, keys, params, jnp.int32(0))
        return Task().outputs(apply, batch)

    return found(params)


def test_the_temperature_of_the_teacher_rises_with_the_step():
    apply, found = Given(lambda views: {'logits': views.mean((1, 2))}), []
    for apply.step in (0, 1, 4, 9):
        found.append(Task(warmup=4).outputs(apply, made()[1])['teacher_temp'])
    assert found == pytest.approx([0.04, 0.0475, 0.07, 0.07])
    batch = {'mask': jnp.ones(6)}
    sharp, soft = (Task().loss({**outputs(), 'teacher_temp': t}, batch) for t in (0.04, 0.07))
    assert sharp['target_entropy'].sum < soft['target_entropy'].sum


def test_a_teacher_that_is_the_student_agrees_with_it():
    found = outputs()
    assert found['teacher'].shape == (6, 2, 8) and found['student'].shape == (6, 5, 8)
    np.testing.assert_allclose(found['teacher'], found['student'][:, :2], atol=1e-5)
    assert not np.allclose(found['student'][:, 0], found['student'][:, 1], atol=1e-2)


@pytest.mark.parametrize('sinkhorn', [0, 3])
def test_what_all_rows_have_in_common_is_no_target(sinkhorn):
    found = outputs()
    shift = np.linspace(-1, 1, 8)
    shifted = {**found, 'teacher': found['teacher'] + shift}
    assert loss(shifted, sinkhorn=sinkhorn) == pytest.approx(
        loss(found, sinkhorn=sinkhorn), rel=1e-4
    )
    other = {**found, 'student': found['student'] + shift}
    assert abs(loss(other, sinkhorn=sinkhorn) - loss(found, sinkhorn=sinkhorn)) > 1e-2


@pytest.mark.parametrize('sinkhorn', [0, 3])
def test_padding_has_no_part(sinkhorn):
    found, mask = outputs(), (1, 1, 1, 1, 0, 0)
    noise = {k: x.at[4:].set(7 * x[4:] + 1) if x.ndim else x for k, x in found.items()}
    expected = loss(found, mask, sinkhorn=sinkhorn)
    assert loss(noise, mask, sinkhorn=sinkhorn) == pytest.approx(expected, rel=1e-5)
    assert loss(noise, sinkhorn=sinkhorn) != pytest.approx(expected, rel=1e-2)


def test_sinkhorn_gives_prototypes_equal_shares():
    teacher = 5 * jnp.asarray(np.random.default_rng(0).normal(size=(32, 2, 8)))
    found = {'teacher': teacher, 'teacher_temp': 1.0, 'student': teacher}
    usage = Task(sinkhorn=50).loss(found, {'mask': jnp.ones(32)})['usage_entropy']
    assert usage.sum / usage.count == pytest.approx(np.log(8), abs=1e-6)


def test_the_order_of_local_views_does_not_matter_and_that_of_global_ones_pairs_them():
    found = outputs()
    local = {**found, 'student': found['student'][:, [0, 1, 4, 2, 3]]}
    assert loss(local) == pytest.approx(loss(found), rel=1e-6)
    swapped = {**found, 'student': found['student'][:, [1, 0, 2, 3, 4]]}
    assert abs(loss(swapped) - loss(found)) > 1e-3


def test_rows_are_coupled():
    with pytest.raises(AssertionError, match='couples the rows'):
        base.check_rows_are_separable(Task(), outputs(), {'mask': np.ones(6, np.float32)})
