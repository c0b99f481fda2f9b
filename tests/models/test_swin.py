"""Swin: exact sizes, a hierarchy of windows, and parameters for other windows."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import numbers, says
from helpers.pictures import drawn, images_like

from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.models.swin import Model, variant
from vit_jax.nn import windows
from vit_jax.nn.maps import AttentionMap
from vit_jax.profiling import flops
from vit_jax.tree_paths import param_paths

DEEP = [('S', 224), ('B', 224), ('B/w12', 384), ('L', 224), ('L/w12', 384)]
TINY = {'patch_size': 2, 'width': 8, 'depths': (2, 1), 'num_heads': (2, 4), 'window': 3}


def shapes(model, *size):
    images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)


def norms(model, size):
    """What the authors' script counts besides products: an operation for each normalized value.

    Two norms a block, one of the embedding, and, with its 4 D values counted as D, one at each
    merging; the last as one value in 2^stages of a map as large as the first.
    """
    side, total = size // model.patch_size, 0
    total += side**2 * model.width
    for i, depth in enumerate(model.depths):
        values = (side // 2**i) ** 2 * model.width * 2**i
        total += 2 * depth * values + (values if i + 1 < len(model.depths) else 0)
    stages = len(model.depths)
    return total + model.width * 2 ** (stages - 1) * side**2 // 2**stages


def closed_form(model, size):
    """Parameters, and multiplications of products, for square images that windows divide."""
    tokens, keys, width = (size // model.patch_size) ** 2, model.window**2, model.width
    pixels = model.patch_size**2 * 3
    params, macs = (pixels + 1) * width + 2 * width, tokens * pixels * width
    for i, (depth, heads) in enumerate(zip(model.depths, model.num_heads, strict=True)):
        table = (2 * model.window - 1) ** 2 * heads
        params += depth * (12 * width**2 + 13 * width + table)
        macs += depth * tokens * (12 * width**2 + 2 * keys * width)
        if i + 1 < len(model.depths):
            params += 8 * width**2 + 8 * width
            tokens, width = tokens // 4, 2 * width
            macs += tokens * 2 * width**2
    classes = model.num_classes
    return params + 2 * width + (width + 1) * classes, macs + width * classes


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'size', 'params', 'macs'),
    [
        ('T', 224, 28_288_354, 4_494_405_120),
        ('S', 224, 49_606_258, 8_746_520_064),
        ('B', 224, 87_768_224, 15_438_473_216),
        ('B/w12', 384, 87_903_584, 47_105_253_376),
        ('L', 224, 196_532_476, 34_487_049_216),
        ('L/w12', 384, 196_735_516, 103_952_265_216),
    ],
)
def test_parameters_and_operations_are_those_of_the_authors(name, size, params, macs):
    model = Model(num_classes=1000, **variant(name))
    found, products = closed_form(model, size)
    assert (found, products + norms(model, size)) == (params, macs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'size'),
    [('mu', 56), ('T', 224), *(pytest.param(*x, marks=pytest.mark.long) for x in DEEP)],
)
def test_models_have_the_parameters_and_products_of_the_closed_form(name, size):
    model = Model(num_classes=1000, **variant(name))
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    leaves = []

    def init(key, images):
        outputs, variables = model.init_with_output(key, images)
        leaves.extend(jax.tree.leaves(variables))
        return outputs

    products = flops.count_flops(init, jax.random.key(0), images)
    assert (sum(leaf.size for leaf in leaves), products // 2) == closed_form(model, size)


def test_the_smallest_variant_has_its_size():
    variables = shapes(Model(num_classes=10, **variant('mu')), 32, 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == 37_382


@pytest.mark.slow
@pytest.mark.parametrize('size', [pytest.param((12, 12), marks=pytest.mark.long), (13, 22)])
def test_maps_of_any_size(size):
    model = Model(num_classes=5, **TINY)
    images = images_like(2, *size, 3)
    apply = jax.jit(lambda p, x: model.apply({'params': p}, x, mutable='intermediates'))
    outputs, sown = apply(drawn(model, images), images)
    outputs = jax.device_get(outputs)
    rows, columns = (-(-side // 4) for side in size)
    assert outputs['features'].shape == (2, rows, columns, 16)
    assert outputs['logits'].shape == (2, 5)
    np.testing.assert_allclose(
        outputs['pre_logits'], outputs['features'].mean(axis=(1, 2)), atol=1e-6
    )
    maps = model.attention_maps(sown['intermediates'], images)
    assert [m.name for m in maps] == ['stage_0/block_0', 'stage_0/block_1', 'stage_1/block_0']
    fine, coarse = (-(-size[0] // 2), -(-size[1] // 2)), (rows, columns)
    assert [m.query_grid for m in maps] == [fine, fine, coarse]
    for m in maps:
        assert isinstance(m, AttentionMap) and m.key_grid == m.query_grid
        weights = np.asarray(m.weights)
        heads = 2 if m.query_grid == fine else 4
        assert weights.shape[:3] == (2, heads, m.query_grid[0] * m.query_grid[1])
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_recomputing_blocks_changes_nothing():
    images = images_like(4, 8, 8, 3)
    fields = TINY | {'depths': (2,), 'num_heads': (2,), 'drop_path': 0.5}
    params = drawn(Model(**fields), images)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, remat):
        def loss(params):
            rngs = {'dropout': jax.random.key(3)}
            model = Model(**fields, remat=remat)
            variables = {'params': params}
            return (model.apply(variables, images, train=True, rngs=rngs)['features'] ** 3).sum()

        return jax.grad(loss)(params)

    plain, recomputed = gradient(params, False), gradient(params, 'names')
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, recomputed)
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(plain))


def test_stochastic_depth_rises_over_all_blocks():
    model = Model(**TINY | {'depths': (2, 3)}, drop_path=0.4)
    rates = {}

    def keep(next_fun, args, kwargs, context):
        if isinstance(context.module, windows.WindowBlock) and context.method_name == '__call__':
            rates['/'.join(context.module.path)] = args[2]
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(keep):
        shapes(model, 12, 12)
    np.testing.assert_allclose(list(rates.values()), [0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(('residual', 'first'), [(None, 'bfloat16'), ('float32', 'float32')])
def test_the_residual_stream_has_the_dtype_asked_for_up_to_the_first_merging(residual, first):
    model = Model(**TINY, dtype='bfloat16', residual_dtype=residual)

    def call(params):
        is_block = lambda m, name: isinstance(m, windows.WindowBlock) and name == '__call__'  # noqa: E731
        images = jnp.zeros((1, 12, 12, 3))
        return model.apply({'params': params}, images, capture_intermediates=is_block)[1]

    kept = jax.eval_shape(call, shapes(model, 12, 12)['params'])['intermediates']
    sums = {path: x for path, x in param_paths(kept).items() if '__call__' in path}
    dtypes = {path.split('/')[0]: x.dtype for path, x in sums.items()}
    assert dtypes == {'stage_0': jnp.dtype(first), 'stage_1': jnp.dtype('bfloat16')}


def test_bfloat16_keeps_parameters_and_logits_in_float32():
    model = Model(num_classes=3, dtype='bfloat16', **TINY)
    variables = shapes(model, 12, 12)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}
    images = jax.ShapeDtypeStruct((1, 12, 12, 3), jnp.float32)
    outputs = jax.eval_shape(model.apply, variables, images)
    assert outputs['features'].dtype == jnp.bfloat16 and outputs['logits'].dtype == jnp.float32


def test_every_parameter_has_its_layer():
    model = Model(num_classes=3, **TINY | {'depths': (2, 2, 1), 'num_heads': (2, 2, 2)})
    order = model.layer_order()
    assert len(order) == 6
    layers = {
        path: [i for i, pattern in enumerate(order) if re.search(pattern, path)]
        for path in param_paths(shapes(model, 24, 24)['params'])
    }
    assert all(
        len(found) == (0 if re.match('(norm|head)/', p) else 1) for p, found in layers.items()
    )
    assert layers['stage_0/merge/reduction/kernel'] == [2]
    assert layers['patch_embed/kernel'] == layers['embed_norm/scale'] == [0]


def test_windows_of_another_size_get_resized_tables():
    old, new = Model(num_classes=3, **TINY), Model(num_classes=3, **TINY | {'window': 5})
    target = shapes(new, 24, 24)['params']
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes(old, 12, 12)['params'])
    fitted, notes = adapt.adapt(params, target, new, old_size=(12, 12), new_size=(24, 24))
    assert says(notes, 'position_bias', 'bicubic') and numbers(notes[0]) == [3, 5]
    table = fitted['stage_0']['block_0']['attention']['position_bias']
    np.testing.assert_allclose(table, np.ones((9, 9, 2)), atol=1e-6)
    same, notes = adapt.adapt(params, shapes(old, 24, 24)['params'], old, new_size=(24, 24))
    assert notes == [] and jax.tree.all(jax.tree.map(np.array_equal, same, params))


@pytest.mark.parametrize('sizes', [(7, 12), (12, 7), (4, 7)])
def test_tables_are_resized_as_torch_does(sizes):
    torch = pytest.importorskip('torch')
    old, new = (2 * window - 1 for window in sizes)
    table = np.random.default_rng(0).normal(size=(old, old, 3)).astype(np.float32)
    model = Model(**TINY | {'window': sizes[1]})
    tree = {'stage_0': {'block_0': {'attention': {'position_bias': table}}}}
    tree, _ = model.resize_params(tree, None, (12, 12))
    resized = tree['stage_0']['block_0']['attention']['position_bias']
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(table.transpose(2, 0, 1)[None]), (new, new), mode='bicubic'
    )
    np.testing.assert_allclose(resized, expected[0].numpy().transpose(1, 2, 0), atol=1e-5)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'depths': (2, 2, 2)}, 'every stage'),
        ({'depths': (2, 0)}, 'every stage'),
        ({'num_heads': (3, 4)}, r'width 8 .* 0 .* 3 heads'),
        ({'window': 0}, 'window.*at least 1'),
        ({'gelu': 'exact'}, 'gelu'),
        ({'drop_path': 1.0}, 'drop_path'),
    ],
)
def test_what_no_model_has_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**TINY | fields)


@pytest.mark.parametrize(
    ('name', 'message'), [('Ti', 'did you mean'), ('T/12', 'T/w12'), ('B/w0', 'B/w12')]
)
def test_variants_are_named(name, message):
    with pytest.raises(UserError, match=message):
        variant(name)


def test_a_picture_shows_the_bias_for_keys_around_the_query():
    model = Model(**TINY)
    params = jax.tree.map(lambda x: np.zeros(x.shape), shapes(model, 12, 12)['params'])
    table = params['stage_0']['block_1']['attention']['position_bias']
    table[3, 2, 1] = 1.0  # of head 1 for a key one row above its query
    pictures = {p.name: p for p in model.parameter_pictures(params, None)}
    assert len(pictures) == 3 and all(p.each == 'head' for p in pictures.values())
    found = pictures['stage_0/block_1/attention/position_bias'].pictures
    assert found.shape == (2, 5, 5) and found[1, 1, 2] == 1 and found.sum() == 1
