"""Frozen parameters are not differentiated by: the same updates for fewer FLOPs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import contrastive, toys

from vit_jax.config.run import Parallel, Step
from vit_jax.models import vit
from vit_jax.optim import param_groups
from vit_jax.runtime import sharding
from vit_jax.step import Optimizer, init_state, init_variables, make_train_step
from vit_jax.tasks import classify
from vit_jax.tree_paths import param_paths

LAYOUTS = {
    'one': {},
    'jit': {},
    'fsdp': {'fsdp': 8, 'min_split_size': 8},
    'pmap': {'strategy': 'pmap'},
}
SYSTEMS = {'separable': toys, 'coupled': contrastive}
FROZEN = 'kernel$'
CASES = [('coupled', 'pmap', 2)]
REST = [(s, name, steps) for s in SYSTEMS for name in LAYOUTS for steps in (1, 2)]


def updated(system, name, accum_steps, freeze):
    """Parameters before and after a step of SGD that keeps FROZEN, and the norm of the gradient."""
    model, task = SYSTEMS[system].Model(), SYSTEMS[system].Task()
    batch = SYSTEMS[system].make_batch()
    tx = param_groups.freeze_matching(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)), [FROZEN]
    )
    devices = jax.devices()[: 1 if name == 'one' else 8]
    layout = sharding.make_layout(devices, Parallel(**LAYOUTS[name]))

    def init():
        example = {k: jnp.asarray(x[:1]) for k, x in batch.items()}
        variables = init_variables(model, task, example, seed=0)
        return init_state(variables, tx, seed=0, ema=False)

    train_step = make_train_step(
        model, task, Optimizer(tx, freeze), Step(accum_steps=accum_steps), layout
    )
    step = layout.compile_train(train_step, jax.eval_shape(init))
    state = layout.create(init)
    before = jax.tree.map(np.array, param_paths(layout.to_global(state).params))
    state, metrics = step(state, layout.put_batch(batch))
    return before, param_paths(layout.to_global(state).params), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ('system', 'name', 'accum_steps'),
    CASES + [pytest.param(*case, marks=pytest.mark.long) for case in REST if case not in CASES],
)
def test_the_updates_are_those_of_the_whole_gradient(system, name, accum_steps):
    before, wanted, whole = updated(system, name, accum_steps, ())
    _, after, metrics = updated(system, name, accum_steps, (FROZEN,))
    held = [path for path in before if re.search(FROZEN, path)]
    assert 0 < len(held) < len(before)
    for path, value in after.items():
        np.testing.assert_allclose(value, wanted[path], rtol=0, atol=1e-6, err_msg=path)
        same = np.array_equal(value, before[path])
        assert same == (path in held), path
    # Its norm does not count them any more; the loss does not change.
    assert 0 < float(metrics['grad_norm']) < float(whole['grad_norm'])
    for key in ('loss', 'update_norm', 'param_norm'):
        assert float(metrics[key]) == pytest.approx(float(whole[key]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('freeze', 'share'),
    [
        (('^(patch_embed|cls_token|pos_embed|encoder)',), (0.3, 0.45)),
        pytest.param(('^patch_embed', 'block_0/'), (0.5, 0.9), marks=pytest.mark.long),
    ],
)
def test_a_frozen_encoder_costs_its_forward_pass_alone(freeze, share):
    """All FLOPs of three passes, by the compiler's cost analysis, become those of about one."""
    model = vit.Model(num_classes=4, patch_size=4, width=32, depth=2, mlp_dim=64, num_heads=2)
    task = classify.Task()
    tx = param_groups.freeze_matching(optax.sgd(1.0), freeze)
    batch = {
        'image': jax.ShapeDtypeStruct((8, 16, 16, 3), np.uint8),
        'label': jax.ShapeDtypeStruct((8,), np.int32),
    }

    def init(batch):
        return init_state(init_variables(model, task, batch, 0), tx, 0, False)

    state = jax.eval_shape(init, batch)

    def flops(freeze):
        step = make_train_step(model, task, Optimizer(tx, freeze))
        return jax.jit(step).lower(state, batch).compile().cost_analysis()['flops']

    before, after = flops(()), flops(freeze)
    assert share[0] < after / before < share[1], (before, after)
