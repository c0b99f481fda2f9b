"""Hybrids: exact parameter counts, a bottleneck computed by hand, dtypes, mistakes, commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import precision
from helpers.pictures import count, drawn, images_like, shapes, spec

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.hybrid import VARIANTS, Bottleneck, Model, ResNet, Root, parts, variant
from vit_jax.profiling import flops
from vit_jax.tree_paths import path_name

TINY = {'layers': (1, 1), 'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}

# With 1000 and 21,843 classes and images of 224 x 224. The former are the counts of
# google-research/vision_transformer; the head alone is the difference.
COUNTS = {
    'R+Ti/16': (6_337_704, 10_360_403),
    'R26+S/32': (36_431_912, 44_456_467),
    'R26+B/32': (101_383_976, 117_412_243),
    'R50+B/16': (98_659_112, 114_687_379),
    'R50+L/32': (328_994_856, 350_358_931),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ('R26+S/32', 'R50+L/32')))
        for name in COUNTS
    ],
)
def test_parameter_counts_are_exact(name):
    tree = shapes(Model(num_classes=1000, scan=True, **variant(name)))
    width, head = tree['head']['kernel'].shape[0], count(tree['head'])
    assert (count(tree), count(tree) - head + (width + 1) * 21_843) == COUNTS[name]


def test_every_variant_has_a_listed_count():
    assert set(COUNTS) == set(VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'stride'),
    [
        ('R+Ti/16', 32),
        ('R26+S/32', 32),
        ('R50+B/16', 16),
        pytest.param('R26+B/32', 32, marks=pytest.mark.long),
        pytest.param('R50+L/32', 32, marks=pytest.mark.long),
    ],
)
def test_tokens_at_two_sizes(name, stride):
    model = Model(num_classes=1000, scan=True, **variant(name))
    assert model.stride == stride
    init = model.clone(layers=(1,) * len(model.layers)).init_with_output  # the grid is the same
    for size in ((224, 224), (224, 384)):
        outputs, variables = jax.eval_shape(init, jax.random.key(0), spec(2, *size, 3))
        tokens = 1 + size[0] // stride * size[1] // stride
        assert variables['params']['pos_embed'].shape == (1, tokens, model.width)
        assert outputs['tokens'].shape == (2, tokens, model.width)
        assert outputs['logits'].shape == (2, 1000)


def test_parameter_names():
    def norm(name, width):
        return {f'{name}/scale': (width,), f'{name}/bias': (width,)}

    def block(name, inputs, width):
        return {
            f'{name}/conv1/kernel': (1, 1, inputs, width),
            **norm(f'{name}/norm1', width),
            f'{name}/conv2/kernel': (3, 3, width, width),
            **norm(f'{name}/norm2', width),
            f'{name}/conv3/kernel': (1, 1, width, 4 * width),
            **norm(f'{name}/norm3', 4 * width),
        }

    def proj(name, inputs, outputs):
        kernel = {f'{name}/proj/kernel': (1, 1, inputs, outputs)}
        return {**kernel, **norm(f'{name}/proj_norm', outputs)}

    params = shapes(Model(num_classes=7, patch_size=2, **{**TINY, 'layers': (1, 2)}), (32, 48))
    names = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert {name: s for name, s in names.items() if not name.startswith('encoder/')} == {
        'resnet/root/conv/kernel': (7, 7, 3, 64),
        **norm('resnet/root/norm', 64),
        **block('resnet/stage_0/block_0', 64, 64),
        **proj('resnet/stage_0/block_0', 64, 256),
        **block('resnet/stage_1/block_0', 256, 128),
        **proj('resnet/stage_1/block_0', 256, 512),
        **block('resnet/stage_1/block_1', 512, 128),
        'patch_embed/kernel': (2, 2, 512, 16),
        'patch_embed/bias': (16,),
        'cls_token': (1, 1, 16),
        'pos_embed': (1, 7, 16),
        'head/kernel': (16, 7),
        'head/bias': (7,),
    }


def np_conv(x, kernel, stride=1):
    """A sum over the window for every output; TensorFlow's SAME padding, more at the end."""
    kernel = np.asarray(kernel, np.float64)
    kernel = kernel - kernel.mean((0, 1, 2))
    kernel = kernel / (np.sqrt((kernel**2).mean((0, 1, 2))) + 1e-5)
    k, sides = len(kernel), x.shape[1:3]
    out = [-(-side // stride) for side in sides]
    total = [max((o - 1) * stride + k - side, 0) for o, side in zip(out, sides, strict=True)]
    x = np.pad(x, ((0, 0), *((t // 2, t - t // 2) for t in total), (0, 0)))
    y = np.zeros((len(x), *out, kernel.shape[-1]))
    for i, j in np.ndindex(*out):
        window = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
        y[:, i, j] = np.einsum('bhwc,hwcd->bd', window, kernel)
    return y


def np_norm(x, p):
    groups = x.reshape(*x.shape[:3], 32, -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    var = groups.var((1, 2, 4), keepdims=True)
    y = ((groups - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
    return y * np.asarray(p['scale'], np.float64) + np.asarray(p['bias'], np.float64)


def np_block(x, p, stride):
    y = np.maximum(np_norm(np_conv(x, p['conv1']['kernel']), p['norm1']), 0)
    y = np.maximum(np_norm(np_conv(y, p['conv2']['kernel'], stride), p['norm2']), 0)
    y = np_norm(np_conv(y, p['conv3']['kernel']), p['norm3'])
    if 'proj' in p:
        x = np_norm(np_conv(x, p['proj']['kernel'], stride), p['proj_norm'])
    return np.maximum(x + y, 0)


@pytest.mark.parametrize(
    ('stride', 'channels', 'size'),
    [(1, 64, (5, 4)), (2, 64, (6, 8)), (2, 256, (5, 6)), (1, 256, (4, 4))],
    ids=['projected', 'halved', 'halved, as wide', 'identity'],
)
def test_a_bottleneck_by_hand(stride, channels, size):
    x = images_like(2, *size, channels)
    block = Bottleneck(width=64, stride=stride)
    params = drawn(block, x)
    assert ('proj' in params) == ('proj_norm' in params) == (channels == 64 or stride == 2)
    with jax.default_matmul_precision('highest'):
        y = jax.jit(block.apply)({'params': params}, x)
    expected = np_block(np.asarray(x, np.float64), params, stride)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_epsilons_show_where_kernels_and_features_are_small():
    """Deviations of 1e-5 and 1e-3, those of the epsilons, so that a wrong one is wrong by half."""
    x = 1e-3 * images_like(1, 4, 4, 64) / 64**0.5
    block = Bottleneck(width=64)
    params = drawn(block, x)
    for name in ('conv1', 'conv2', 'conv3', 'proj'):
        params[name]['kernel'] *= 1e-5 / np.std(params[name]['kernel'])
    with jax.default_matmul_precision('highest'):
        y = jax.jit(block.apply)({'params': params}, x)
    expected = np_block(np.asarray(x, np.float64), params, 1)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_the_root_by_hand():
    x = images_like(2, 8, 12, 3)
    root = Root(64)
    params = drawn(root, x)
    y = np.asarray(x, np.float64)
    y = np.maximum(np_norm(np_conv(y, params['conv']['kernel'], 2), params['norm']), 0)
    y = np.pad(y, ((0, 0), (0, 1), (0, 1), (0, 0)))
    pooled = np.stack(
        [y[:, i : i + 4 : 2, j : j + 6 : 2][:, :2, :3] for i in range(3) for j in range(3)]
    ).max(0)
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(jax.jit(root.apply)({'params': params}, x), pooled, atol=1e-5)


@pytest.mark.slow
def test_the_encoder_sees_the_feature_map_row_by_row():
    """A hybrid is its ResNet, then a ViT with the rest of its parameters on the feature map."""
    model = Model(num_classes=5, patch_size=2, **TINY)
    images = images_like(2, 32, 48, 3)
    params = drawn(model, images)
    rest = {k: v for k, v in params.items() if k != 'resnet'}
    features = jax.jit(ResNet(TINY['layers']).apply)({'params': params['resnet']}, images)
    fields = {k: v for k, v in TINY.items() if k != 'layers'}
    plain = vit.Model(num_classes=5, patch_size=2, **fields)
    np.testing.assert_allclose(
        jax.jit(model.apply)({'params': params}, images)['logits'],
        jax.jit(plain.apply)({'params': rest}, features)['logits'],
        atol=1e-5,
    )
    assert features.shape == (2, 4, 6, 512)


def test_fixed_positions_and_other_pools_follow_the_stride():
    model = Model(num_classes=5, pool='gap', posemb='sincos2d', **TINY)
    images = images_like(1, 24, 16, 3)
    params = drawn(model, images)
    assert 'pos_embed' not in params
    outputs = jax.eval_shape(model.apply, {'params': params}, images)
    assert outputs['tokens'].shape == (1, 6, 16)


@pytest.mark.slow
@pytest.mark.long
def test_bfloat16_computes_close_to_float32_with_float32_statistics():
    model, images = Model(num_classes=5, **TINY | {'layers': (1,)}), images_like(2, 32, 32, 3)
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some twenty roundings. There are five
    # group norms and three layer norms.
    precision.assert_bfloat16_is_close(
        model, drawn(model, images), images, 'tokens', 0.08, norms=5 + 3, convs=5
    )


@pytest.mark.slow
def test_gradients_are_finite_and_reach_every_parameter():
    model = Model(num_classes=5, **TINY | {'layers': (1,)})
    images = images_like(2, 16, 24, 3)
    precision.assert_gradients_reach_all(model, drawn(model, images), images)


def test_a_constant_kernel_has_a_finite_gradient():
    conv = parts('authors', jnp.float32)[0](32, 3)
    x = images_like(1, 4, 4, 8)
    grad = jax.jit(jax.grad(lambda p: (conv.apply(p, x) ** 2).sum() + conv.apply(p, x).sum()))
    for value in (0.0, 0.5):
        params = {'params': {'kernel': jnp.full((3, 3, 8, 32), value)}}
        grads = grad(params)
        assert np.isfinite(grads['params']['kernel']).all()


@pytest.mark.slow
def test_branches_start_at_zero():
    params = jax.jit(ResNet((1,)).init)(jax.random.key(0), images_like(1, 16, 16, 3))['params']
    block = params['stage_0']['block_0']
    assert not np.asarray(block['norm3']['scale']).any()
    for name in ('norm1', 'norm2', 'proj_norm'):
        np.testing.assert_array_equal(block[name]['scale'], 1.0)


@pytest.mark.slow
def test_flops_are_those_of_the_vit_and_of_the_convolutions_before_it():
    images = spec(1, 224, 224, 3)
    fields = {'num_classes': 1000, 'scan': True}
    counted = flops.forward_flops(Model(**fields, **variant('R50+B/16')), images)
    plain = flops.forward_flops(vit.Model(**fields, **vit.variant('B/16')), images)
    patches = 2 * 196 * 768 * (1024 - 16 * 16 * 3)
    macs, side, inputs = 112**2 * 7 * 7 * 3 * 64, 56, 64
    for i, depth in enumerate((3, 4, 9)):
        width = 64 * 2**i
        for j in range(depth):
            before, side = side**2, side // (2 if i > 0 and j == 0 else 1)
            macs += before * inputs * width + side**2 * (9 * width + 4 * width) * width
            macs += side**2 * inputs * 4 * width * (j == 0)
            inputs = 4 * width
    assert counted == plain + patches + 2 * macs


def test_variant_gives_keywords_of_the_model():
    assert variant('R26+S/32') == {
        'layers': (2, 2, 2, 2),
        'patch_size': 1,
        'width': 384,
        'depth': 12,
        'mlp_dim': 1536,
        'num_heads': 6,
    }
    assert Model(**variant('R50+B/16')) == Model()


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: variant('R50+B/32'), r"variant.*'R50\+B/32'.*'R"),
        (lambda: Model(layers=(2, 0)), r'layers \(2, 0\):'),
        (lambda: Model(width=30), r'width 30 .* num_heads 12'),
        (
            lambda: shapes(Model(**variant('R26+S/32')), (224, 240)),
            r'images are 240 x 224: .* 32 pixels',
        ),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(UserError, match=message):
        call()


CONFIG = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import bit_resnet, hybrid


def get_config(arg):
    config = ConfigDict(dict(seed=0, total='10 steps', batch_size=8))
    module = {'hybrid': hybrid, 'bit_resnet': bit_resnet}[arg.partition(',')[0]]
    config.model = dict(name=arg.partition(',')[0], **module.variant(arg.partition(',')[2]))
    config.model.num_classes = placeholder(int)
    config.task = dict(name='classify')
    config.data = dict(source='folder:/nowhere', split='train', transforms='')
    config.evals = {}
    config.optim = dict(name='sgd', lr=0.1)
    config.step = {}
    config.every = dict(log='1', eval='1', checkpoint='1')
    config.checkpoint = {}
    config.parallel = {}
    return config
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arg', 'count', 'layers'),
    [
        ('hybrid,R+Ti/16', 6_337_704, '()'),
        pytest.param('bit_resnet,R50x1', 25_549_352, '(3, 4, 6, 3)', marks=pytest.mark.long),
    ],
)
def test_inspect_reads_a_config_of_it(arg, count, layers, tmp_path, capsys):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG)
    words = ['--config', f'{path}:{arg}', '--image-size', '224', '--config.model.layers', layers]
    assert cli.main(['inspect', *words, '--json']) == 0
    result = json.loads(capsys.readouterr().out)
    assert result['total'] == count
    assert result['flops']['train'] == 3 * result['flops']['forward'] > 1e9
