"""Models are differentiated in forward mode, too; `test_lowering` does so with every system."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import drawn, images_like

import vit_jax
from vit_jax.models import eomt, swin, vit

PACKAGE = pathlib.Path(vit_jax.__file__).parent
SIZE = {'num_classes': 5, 'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 32, 'num_heads': 2}
MODELS = {
    'vit': vit.Model(**SIZE, attention='xla'),
    'vit-scan': vit.Model(**SIZE, attention='xla', scan=True, remat='names'),
    'vit-float16': vit.Model(**SIZE, attention='xla', dtype='float16'),
    'swin': swin.Model(
        5, patch_size=2, width=8, depths=(2,), num_heads=(2,), window=4, attention='xla'
    ),
    'eomt': eomt.Model(**SIZE, num_queries=3, query_blocks=1, attention='xla'),
}
# In which nothing is derived in another way than in the others; `test_lowering` derives Swin, too.
DEAR = ('eomt', 'swin', 'vit', 'vit-float16')


def test_only_kernels_have_rules_that_forbid_forward_mode():
    found = {path for path in PACKAGE.rglob('*.py') if 'custom_vjp' in path.read_text()}
    assert {path.parent for path in found} == {PACKAGE / 'nn' / 'kernels'}


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', [pytest.param(x, marks=pytest.mark.long) if x in DEAR else x for x in MODELS]
)
def test_both_modes_agree(name):
    """<v, J u> = <J^T v, u>, and Hessian-vector products by forward over reverse are symmetric."""
    model, images = MODELS[name], images_like(2, 16, 16, 3)
    params = drawn(model, images)
    u, v = (jax.tree.map(functools.partial(_noise, seed), params) for seed in (2, 3))

    def total(params):
        leaves = jax.tree.leaves(model.apply({'params': params}, images))
        return sum(jnp.cos(x.astype(jnp.float32)).sum() for x in leaves)

    @jax.jit
    def products(params, u, v):
        grad = jax.grad(total)
        _, pushed = jax.jvp(total, (params,), (u,))
        _, hessian_u = jax.linearize(grad, params)
        return pushed, _dot(grad(params), u), _dot(hessian_u(u), v), _dot(hessian_u(v), u)

    pushed, pulled, uhv, vhu = products(params, u, v)
    rtol = 0.05 if name.endswith('16') else 1e-3
    np.testing.assert_allclose(pushed, pulled, rtol=rtol)
    np.testing.assert_allclose(uhv, vhu, rtol=rtol)


@pytest.mark.long
def test_a_jacobian_by_forward_mode_is_that_by_reverse_mode():
    model, images = MODELS['vit'], images_like(1, 16, 16, 3)
    params = drawn(model, images)

    @jax.jit
    def jacobians(scale):
        def tokens(scale):
            return model.apply({'params': params}, images * scale)['tokens'][0, 0]

        return jax.jacfwd(tokens)(scale), jax.jacrev(tokens)(scale)

    forward, reverse = jacobians(jnp.ones(3))
    np.testing.assert_allclose(forward, reverse, atol=1e-4)


def _noise(seed, x):
    return jnp.asarray(np.random.default_rng([seed, x.size]).normal(size=x.shape), x.dtype)


def _dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
