"""LeJEPA: SIGReg against PyTorch, and a step on any split of the batch."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import images_like

from vit_jax import step
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError
from vit_jax.models import lejepa, vit
from vit_jax.ops import terms
from vit_jax.tasks.lejepa import Task, sigreg
from vit_jax.trainer import build

EXPERIMENTS = pathlib.Path(__file__).parents[2] / 'experiments'

B, G, L = 6, 2, 3
MODEL = lejepa.Model(
    **{'patch_size': 2, 'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
    **{'projector': (12,), 'projection': 5, 'projector_norm': 'layer'},
)
BATCH = {'image': images_like(B, G, 8, 8, 3), 'local_image': images_like(B, L, 4, 4, 3, seed=1)}
TASK = Task(directions=7)


def statistic_in_torch(torch, slices):
    """The sliced Epps-Pulley statistic of views [V N S], written after equation 14 of the paper."""
    t = torch.linspace(0, 3, 17, dtype=slices.dtype)
    normal = torch.exp(-(t**2) / 2)
    function = torch.exp(1j * slices[..., None] * t).mean(1)
    density = (function - normal).abs() ** 2 * normal
    return 2 * slices.shape[1] * torch.trapezoid(density, t).mean()


def test_sigreg_equals_torch():
    torch = pytest.importorskip('torch')
    slices = np.random.default_rng(0).normal(0.3, 1.7, (6, 4, 9))
    expected = statistic_in_torch(torch, torch.as_tensor(slices).swapaxes(0, 1))
    value = sigreg(jnp.asarray(slices, jnp.float32), jnp.ones(6))
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


def test_padding_counts_for_nothing():
    slices = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2, 5)), jnp.float32)
    mask = jnp.array([1.0, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(sigreg(slices, mask), sigreg(slices[:4], jnp.ones(4)), rtol=1e-5)


def test_a_gaussian_has_the_least_statistic():
    rng = np.random.default_rng(2)
    ones = jnp.ones(2000)
    gaussian = sigreg(jnp.asarray(rng.normal(size=(2000, 1, 8)), jnp.float32), ones)
    for other in (rng.uniform(-1.7, 1.7, (2000, 1, 8)), np.zeros((2000, 1, 8))):
        assert float(sigreg(jnp.asarray(other, jnp.float32), ones)) > 5 * float(gaussian)


@functools.cache
def variables():
    return jax.jit(lambda: step.init_variables(MODEL, TASK, BATCH, 0))()


def outputs(batch, key=0):
    return _outputs(variables()['params'], batch, jax.random.key(key))


@jax.jit
def _outputs(params, batch, key):
    keys = step.stream_keys(key, TASK.rngs)
    apply = step.TrainApply(MODEL, params, {}, keys, None, jnp.zeros((), jnp.int32))
    return TASK.outputs(apply, batch)


@pytest.mark.slow
def test_views_and_directions():
    every = outputs(BATCH)
    assert every['projected'].shape == (B, G + L, 5) and every['slices'].shape == (B, G + L, 7)
    np.testing.assert_allclose(every['center'], every['projected'][:, :G].mean(1), atol=1e-6)
    turned = outputs({name: x[::-1] for name, x in BATCH.items()})
    np.testing.assert_allclose(turned['slices'], every['slices'][::-1], atol=1e-5)
    assert not np.allclose(outputs(BATCH, 1)['slices'], every['slices'], atol=1e-2)


def test_the_loss_by_hand():
    made = outputs(BATCH)
    scores = terms.means(TASK.loss(made, BATCH))
    center = np.asarray(made['projected'])[:, :G].mean(1, keepdims=True)
    distance = np.square(np.asarray(made['projected']) - center).mean()
    assert float(scores['invariance']) == pytest.approx(distance, rel=1e-5)
    total = terms.total(TASK.loss(made, BATCH), scores)
    assert float(total) == pytest.approx(0.98 * distance + 0.02 * float(scores['sigreg']), rel=1e-5)


def test_the_encoder_is_a_vit():
    fields, names = MODEL.transferable()
    params = {name: variables()['params'][name] for name in names}
    encoder = vit.Model(**{k: v for k, v in fields.items() if k != 'name'})
    images = jnp.asarray(BATCH['image'][:, 0], jnp.float32) / 255
    tokens = jax.jit(encoder.apply)({'params': params}, images)['pre_logits']
    own = jax.jit(MODEL.apply)(variables(), images)
    np.testing.assert_allclose(tokens, own['pre_logits'], atol=1e-6)
    assert own['patches'].shape == (B, 16, 8)


@pytest.mark.parametrize(('field', 'value'), [('sigreg', 1.5), ('directions', 0), ('knots', 1)])
def test_impossible_fields_are_refused(field, value):
    with pytest.raises(UserError) as error:
        Task(**{field: value})
    assert f'task.{field}' in str(error.value)


def test_the_batch_norm_of_the_projector_needs_the_whole_batch(tmp_path):
    recipe = str(EXPERIMENTS / 'lejepa' / 'cifar10.py:smoke')
    config = config_lib.load(recipe, ['step.accum_steps=2'])
    with pytest.raises(UserError) as error:
        build.build(config, jax.devices()[:1])
    assert 'projector_norm' in str(error.value) and 'accum_steps' in str(error.value)
