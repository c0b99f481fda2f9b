"""DINOv2: exact parameter counts, the names of a ViT, hidden patches, positions, and heads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import count, images_like

from vit_jax import step
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.dinov2 import Model
from vit_jax.ops import resize
from vit_jax.tasks.dinov2 import Task
from vit_jax.tree_paths import param_paths

TINY = {'patch_size': 2, 'width': 8, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
HEADS = {'prototypes': 6, 'hidden': 8, 'bottleneck': 4, 'patch_bottleneck': 4}
MODEL = Model(**TINY, **HEADS, patch_prototypes=5)
IMAGES = images_like(4, 8, 8, 3)
PLACES = jnp.asarray([[0, 5, 17], [31, 16, 2]])  # of two images in a row

# (ViT, heads): parameters of the encoder with its mask token, of the authors' DINOHead, and of
# that of patches if it is separate, as in their configs; without layer scale and SwiGLU.
LARGE = {'prototypes': 131_072, 'bottleneck': 384, 'patch_prototypes': 131_072}
COUNTS = {
    'S/14': ({}, 21_619_968, 22_352_128, 0),
    'B/14': ({}, 85_707_264, 23_138_560, 0),
    'L/16': ({}, 303_302_656, 23_662_848, 0),
    'L/14': (LARGE, 303_179_776, 57_545_088, 40_505_600),
}


def shapes(model, side=224, local=96):
    spec = {'image': (1, 2, side, side, 3), 'local_image': (1, 1, local, local, 3)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in spec.items()}
    init = functools.partial(step.init_variables, model, Task(), seed=0)
    return jax.eval_shape(init, batch)['params']


@pytest.fixture(scope='module')
def params():
    """Of 4 x 4 patches, drawn so that no parameter is zero."""
    rng = np.random.default_rng(1)
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape) / 3, s.dtype)  # noqa: E731
    return jax.tree.map(draw, shapes(MODEL, 8, 4))


@functools.partial(jax.jit, static_argnames='model')
def apply(params, images, model=MODEL, **options):
    return model.apply({'params': params}, images, **options)


@pytest.mark.slow
@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    heads, encoder, dino, ibot = COUNTS[name]
    found = shapes(Model(scan=True, **vit.variant(name), **heads), local=98 if '14' in name else 96)
    assert count({k: v for k, v in found.items() if not k.endswith('_head')}) == encoder
    assert count(found['dino_head']) == dino
    assert count(found.get('ibot_head', {})) == ibot


def test_the_encoder_is_a_vit_with_the_same_features(params):
    keywords, parts = MODEL.transferable()
    encoder = vit.Model(**{k: v for k, v in keywords.items() if k != 'name'})
    expected = jax.eval_shape(encoder.init, jax.random.key(0), IMAGES)['params']
    mine = {part: params[part] for part in parts}
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, expected)
    assert params.keys() - set(parts) == {'mask_token', 'dino_head', 'ibot_head'}
    found = jax.jit(encoder.apply)({'params': mine}, IMAGES)
    np.testing.assert_allclose(found['tokens'], apply(params, IMAGES)['tokens'], atol=1e-5)


def test_hidden_patches_are_not_seen_but_their_places_are(params):
    hidden = jnp.zeros((4, 16), bool).at[:, [2, 9]].set(True)
    rows, columns = np.divmod(np.array([2, 9]), 4)
    other = np.array(IMAGES)
    for y, x in zip(rows, columns, strict=True):
        other[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = 7.0
    before = apply(params, IMAGES, masked=hidden)['tokens']
    np.testing.assert_array_equal(
        before, apply(params, jnp.asarray(other), masked=hidden)['tokens']
    )
    assert (before != apply(params, IMAGES)['tokens']).all()
    assert (before[:, 1 + 2] != before[:, 1 + 9]).any()
    none = apply(params, IMAGES, masked=jnp.zeros((4, 16), bool))['tokens']
    np.testing.assert_allclose(none, apply(params, IMAGES)['tokens'], atol=1e-6)


def test_patches_are_picked_through_the_images_of_a_row(params):
    made = apply(params, IMAGES, places=PLACES)
    assert made['patch_scores'].shape == (2, 3, 5)
    every = apply(params, IMAGES, places=jnp.arange(64).reshape(1, 64))['patch_scores'][0]
    expected = np.stack([every[PLACES[0]], every[32 + PLACES[1]]])
    np.testing.assert_allclose(made['patch_scores'], expected, atol=1e-5)


def test_one_head_may_serve_both(params):
    shared = Model(**TINY, **HEADS)
    without = {k: v for k, v in params.items() if k != 'ibot_head'}
    assert jax.tree.map(jnp.shape, without) == jax.tree.map(jnp.shape, shapes(shared, 8, 4))
    made = apply(without, IMAGES, shared, places=PLACES)
    same = {**params, 'ibot_head': params['dino_head']}
    separate = MODEL.clone(patch_prototypes=6)
    expected = apply(same, IMAGES, separate, places=PLACES)
    np.testing.assert_allclose(made['patch_scores'], expected['patch_scores'], atol=1e-6)


def test_positions_of_local_crops_are_interpolated(params):
    """As `interpolate(mode='bicubic')` does it, which `ops.resize` is tested to equal."""
    table = resize.position_embedding(params['pos_embed'], (4, 4), (2, 3), 'bicubic', 1)
    local = images_like(2, 4, 6, 3)
    found = apply(params, local)
    expected = apply({**params, 'pos_embed': jnp.asarray(table)}, local)
    np.testing.assert_allclose(found['tokens'], expected['tokens'], atol=1e-5)
    lengthy = {**params, 'pos_embed': params['pos_embed'][:, :7]}
    with pytest.raises(UserError, match=r'pos_embed.*6 patches'):
        jax.eval_shape(lambda: MODEL.apply({'params': lengthy}, local[:, :, :4]))


@pytest.mark.parity
def test_heads_are_those_of_the_paper(params):
    """A weight-normalized layer on unit vectors behind three layers with exact GELUs."""
    torch = pytest.importorskip('torch')
    head = jax.tree.map(lambda x: torch.from_numpy(np.array(x)), params['dino_head'])
    x = torch.from_numpy(np.array(apply(params, IMAGES)['pre_logits']))
    for name in ('fc1', 'fc2', 'fc3'):
        x = torch.nn.functional.linear(x, head[name]['kernel'].T, head[name]['bias'])
        x = torch.nn.functional.gelu(x) if name != 'fc3' else x
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 6, bias=False))
    with torch.no_grad():
        layer.parametrizations.weight.original0[:] = head['prototypes']['scale'][:, None]
        layer.parametrizations.weight.original1[:] = head['prototypes']['kernel'].T
        expected = layer(torch.nn.functional.normalize(x, dim=-1))
    np.testing.assert_allclose(apply(params, IMAGES)['scores'], expected, atol=1e-5)


@pytest.mark.slow
def test_a_scanned_model_is_the_same(params):
    block = jax.tree.map(lambda x: x[None], params['encoder']['block_0'])
    stacked = {**params, 'encoder': {'blocks': block, 'norm': params['encoder']['norm']}}
    hidden = jnp.zeros((4, 16), bool).at[:, 3].set(True)
    one = apply(params, IMAGES, masked=hidden)['scores']
    other = apply(stacked, IMAGES, MODEL.clone(scan=True), masked=hidden)['scores']
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_registers_layer_scale_and_swiglu_are_those_of_the_vit():
    parts = {'registers': 2, 'layer_scale': 1e-5, 'mlp': 'swiglu'}
    model = MODEL.clone(**parts)
    found = shapes(model, 8, 4)
    assert found['register_tokens'].shape == (1, 2, 8)
    assert {'layer_scale1', 'layer_scale2'} <= found['encoder']['block_0'].keys()
    keywords, names = model.transferable()
    assert keywords['registers'] == 2 and 'register_tokens' in names
    assert (
        keywords['block'].items() >= {'gelu': 'erf', 'layer_scale': 1e-5, 'mlp': 'swiglu'}.items()
    )
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape), found)
    made = apply(zeros, IMAGES, model, places=PLACES)
    assert made['tokens'].shape == (4, 19, 8) and made['patches'].shape == (4, 16, 8)


def test_layers_are_in_the_order_of_the_authors():
    """Embeddings first, the heads with the norm last, for layer-wise decay."""
    first, block = MODEL.layer_order()
    paths = param_paths(shapes(MODEL, 8, 4))
    of_first = {path.partition('/')[0] for path in paths if re.search(first, path)}
    assert of_first == {'patch_embed', 'cls_token', 'pos_embed', 'mask_token'}
    assert all(path.startswith('encoder/block_0') for path in paths if re.search(block, path))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'prototypes': 0}, r'prototypes .* 1, not 0'),
        ({'num_heads': 3}, r'width 8 .* num_heads 3'),
        ({'gelu': 'relu'}, "gelu 'relu'"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        MODEL.clone(**fields)


def test_patches_must_tile_all_crops():
    with pytest.raises(UserError, match=r'3 x 3.*height'):
        shapes(MODEL, 8, 3)
