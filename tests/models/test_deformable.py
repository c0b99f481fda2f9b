"""Deformable attention: samples like PyTorch's, in two forms, and groups of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models._deformable import (
    Cells,
    DeformableBlock,
    cell_weights,
    sample_by_gather,
    sample_by_product,
    weights_of_patches,
)

SIZE = (3, 5)


@pytest.fixture(scope='module')
def drawn():
    """Values of two maps, and points of which some lie at the border and some far outside."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 15, 2, 4)).astype(np.float32)
    points = rng.uniform(-0.4, 1.4, (2, 6, 2, 3, 2)).astype(np.float32)
    points[0, 0, 0] = [[0, 0], [1, 1], [0.52, 0.02]]
    return values, points, rng.uniform(size=(2, 6, 2, 3)).astype(np.float32)


@pytest.mark.parity
@pytest.mark.parametrize(
    'sample', [sample_by_gather, pytest.param(sample_by_product, marks=pytest.mark.long)]
)
def test_samples_and_gradients_are_those_of_pytorch(sample, drawn):
    torch = pytest.importorskip('torch')
    theirs = [torch.from_numpy(x).requires_grad_() for x in drawn]
    values, points, weights = theirs
    maps = values.permute(0, 2, 3, 1).reshape(4, 4, *SIZE)
    grids = 2 * points.swapaxes(1, 2).flatten(0, 1) - 1
    sampled = torch.nn.functional.grid_sample(maps, grids, align_corners=False)
    sampled = sampled.reshape(2, 2, 4, 6, 3)  # batch, heads, width, queries, points
    expected = torch.einsum('bhkqp,bqhp->bqhk', sampled, weights)
    (expected**2).sum().backward()

    def total(*inputs):
        y = sample(inputs[0], SIZE, *inputs[1:])
        return (y**2).sum(), y

    with jax.default_matmul_precision('highest'):
        grads, found = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*drawn)
    np.testing.assert_allclose(found, expected.detach(), atol=1e-5)
    for mine, other in zip(grads, theirs, strict=True):
        expected = other.grad.numpy()
        np.testing.assert_allclose(mine, expected, atol=1e-5 * np.abs(expected).max())


def test_weights_of_cells_add_up_to_those_of_points_inside(drawn):
    _, points, weights = drawn
    inside = points * 0.3 + 0.35  # half a cell from each side
    found = cell_weights(SIZE, jnp.asarray(inside), jnp.asarray(weights))
    np.testing.assert_allclose(found.sum(-1), weights.sum(-1).swapaxes(1, 2), rtol=1e-5)


def test_weights_of_several_maps_are_those_of_the_patches_that_their_cells_cover():
    sizes = [(6, 10), (2, 3)]
    ones = jnp.ones((1, 1, 1, 66))
    found = weights_of_patches(ones, sizes, SIZE)
    np.testing.assert_allclose(found, np.full((1, 1, 1, 15), 66 / 15), rtol=1e-6)
    one = jnp.zeros((1, 1, 1, 66)).at[..., 3].set(1).at[..., 60].set(6)
    found = weights_of_patches(one, sizes, SIZE).reshape(SIZE)
    # A cell of the first map lies in a patch; one of the second covers 1.5 x 1 2/3 patches.
    expected = [[2.4, 2.6, 0, 0, 0], [1.2, 0.8, 0, 0, 0], [0] * 5]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_groups_do_not_see_each_other_and_padding_is_not_seen():
    block = DeformableBlock(2, 8, cross_heads=2, points=2)
    rng = np.random.default_rng(0)
    x, tokens = (jnp.asarray(rng.normal(size=(1, n, 8)), jnp.float32) for n in (6, 15))
    mask = jnp.arange(15)[None] % 5 < 4
    boxes = jnp.asarray(rng.uniform(0.3, 0.7, (1, 6, 4)), jnp.float32)
    variables = block.init(jax.random.key(0), x, [Cells(tokens, mask, SIZE)], [boxes], x)

    @jax.jit
    def compute(x, tokens):
        return block.apply(variables, x, [Cells(tokens, mask, SIZE)], [boxes], x, groups=2)

    one, other = compute(x, tokens), compute(x.at[:, 4].add(1), tokens)
    np.testing.assert_array_equal(one[:, :3], other[:, :3])
    assert (one[:, 3:] != other[:, 3:]).any(-1).all()
    changed = jnp.where(mask[..., None], tokens, 9.0)
    np.testing.assert_array_equal(compute(x, changed), one)
