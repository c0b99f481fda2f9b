"""BiT: exact parameter counts, parity with transformers, dtypes, mistakes."""

import re

import jax
import numpy as np
import pytest
from helpers import precision
from helpers.pictures import count, drawn, images_like, shapes, spec

from vit_jax.errors import UserError
from vit_jax.models.bit_resnet import VARIANTS, Model, variant
from vit_jax.nn.resnet import StdConv, standardize
from vit_jax.profiling import flops
from vit_jax.tree_paths import path_name

TINY = {'layers': (1, 2)}
IMAGES = spec(1, 32, 32, 3)

# With 1000 and 21,843 classes. The counts of google-research/big_transfer's networks.
COUNTS = {
    'R50x1': (25_549_352, 68_256_659),
    'R50x3': (217_319_080, 345_399_315),
    'R101x1': (44_541_480, 87_248_787),
    'R101x3': (387_934_888, 516_015_123),
    'R152x2': (236_335_208, 321_728_979),
    'R152x4': (936_533_224, 1_107_299_923),
}


def closed_form(model):
    """Parameters of so many classes."""
    width = 64 * model.width_factor
    total, inputs = 7 * 7 * 3 * width, width
    for depth in model.layers:
        total += inputs * 4 * width  # the projection of the stage's first block
        for _ in range(depth):
            total += inputs * width + 9 * width**2 + 4 * width**2 + 2 * (inputs + 2 * width)
            inputs = 4 * width
        width *= 2
    return total + 2 * inputs + (inputs + 1) * model.num_classes


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    found = (closed_form(Model(num_classes=n, **variant(name))) for n in (1000, 21_843))
    assert tuple(found) == COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        {'layers': (1, 2, 1, 1), 'width_factor': 3},
        *(pytest.param(variant(name), id=name, marks=pytest.mark.long) for name in COUNTS),
    ],
)
def test_models_have_the_parameters_of_the_closed_form(fields):
    model = Model(num_classes=1000, **fields)
    assert count(shapes(model, (32, 32))) == closed_form(model)


def test_every_variant_has_a_listed_count():
    assert set(COUNTS) == set(VARIANTS)


def test_parameter_names():
    names = {
        path_name(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(Model(7, **TINY)))
    }

    def norm(name, width):
        return {f'{name}/scale': (width,), f'{name}/bias': (width,)}

    def block(name, inputs, width):
        return {
            **norm(f'{name}/norm1', inputs),
            f'{name}/conv1/kernel': (1, 1, inputs, width),
            **norm(f'{name}/norm2', width),
            f'{name}/conv2/kernel': (3, 3, width, width),
            **norm(f'{name}/norm3', width),
            f'{name}/conv3/kernel': (1, 1, width, 4 * width),
        }

    assert names == {
        'root/conv/kernel': (7, 7, 3, 64),
        **block('stage_0/block_0', 64, 64),
        'stage_0/block_0/proj/kernel': (1, 1, 64, 256),
        **block('stage_1/block_0', 256, 128),
        'stage_1/block_0/proj/kernel': (1, 1, 256, 512),
        **block('stage_1/block_1', 512, 128),
        **norm('norm', 512),
        'head/kernel': (512, 7),
        'head/bias': (7,),
    }


def hf_state(params):
    """Our parameters under the names and in the layouts of transformers."""
    import torch

    rename = (
        (r'^root/conv/', 'bit/embedder/convolution/'),
        (r'^stage_(\d+)/block_(\d+)/', r'bit/encoder/stages/\1/layers/\2/'),
        ('/proj/', '/downsample/conv/'),
        ('^norm/', 'bit/norm/'),
        ('^head/', 'classifier/1/'),
        ('(kernel|scale)$', 'weight'),
    )
    state = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        for pattern, text in rename:
            name = re.sub(pattern, text, name)
        axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[leaf.ndim]
        state[name.replace('/', '.')] = torch.tensor(np.array(leaf).transpose(axes))
    return state


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    ('fields', 'batch', 'size'),
    [
        pytest.param({'layers': (1, 1, 1)}, 2, (32, 32), marks=pytest.mark.long),
        (TINY, 2, (33, 50)),
        pytest.param(TINY, 1, (17, 7), marks=pytest.mark.long),
        ({'layers': (1,), 'width_factor': 2}, 1, (31, 24)),
        pytest.param({}, 1, (33, 48), marks=pytest.mark.long),
    ],
    ids=['three stages', 'odd and even', 'small', 'wide', 'R50x1'],
)
def test_parity_with_transformers(fields, batch, size):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model = Model(num_classes=11, **fields)
    params = drawn(model, IMAGES)
    width = model.width_factor
    config = transformers.BitConfig(
        layer_type='preactivation',
        depths=model.layers,
        embedding_size=64 * width,
        hidden_sizes=[256 * width * 2**i for i in range(len(model.layers))],
        num_labels=11,
    )
    with torch.device('meta'):
        reference = transformers.BitForImageClassification(config)
    reference.load_state_dict(hf_state(params), strict=True, assign=True)
    images = images_like(batch, *size, 3)
    with torch.no_grad():
        pixels = torch.from_numpy(np.array(images).transpose(0, 3, 1, 2))
        expected = reference.eval()(pixels)
    with jax.default_matmul_precision('highest'):
        outputs = jax.jit(model.apply)({'params': params}, images)
    np.testing.assert_allclose(outputs['logits'], expected.logits, atol=5e-5)


@pytest.mark.slow
def test_shapes_of_the_outputs():
    model = Model(num_classes=1000, layers=(1, 1, 1, 1))
    for size, grid in {(384, 480): (12, 15), (33, 1): (2, 1)}.items():
        outputs, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), spec(2, *size, 3))
        assert outputs['features'].shape == (2, *grid, 2048)
        assert outputs['pre_logits'].shape == (2, 2048)
        assert outputs['logits'].shape == (2, 1000)
    init = Model(**TINY).init_with_output
    outputs, variables = jax.eval_shape(init, jax.random.key(0), spec(1, 8, 8, 1))
    assert 'logits' not in outputs
    assert 'head' not in variables['params']


@pytest.mark.slow
def test_a_pixel_of_features_per_stride_and_the_mean_before_the_head():
    model = Model(num_classes=5, **TINY)
    apply = jax.jit(model.apply)
    outputs = jax.device_get(apply({'params': drawn(model, IMAGES)}, images_like(2, 32, 48, 3)))
    assert outputs['features'].shape == (2, 4, 6, 512)
    assert float(outputs['features'].min()) >= 0.0
    np.testing.assert_allclose(
        outputs['pre_logits'], outputs['features'].mean((1, 2)), rtol=1e-5, atol=1e-6
    )


def test_standardized_kernels():
    # Each epsilon where it belongs: as large as the deviation, they divide by sqrt 2 and by 2.
    shrinking = (((0.1**2, 0.0), 2**0.5), ((0.0, 0.1), 2.0))

    @jax.jit
    def run(kernel):
        out = standardize(kernel, var_eps=1e-10, std_eps=0.0)
        return out, [standardize(0.1 * out, *eps) for eps, _ in shrinking]

    out, shrunk = jax.device_get(run(images_like(3, 3, 5, 8) * 0.1 + 3.0))
    np.testing.assert_allclose(out.mean((0, 1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose(out.std((0, 1, 2)), 1.0, rtol=1e-5)
    for found, (_, factor) in zip(shrunk, shrinking, strict=True):
        np.testing.assert_allclose(found, out / factor, rtol=1e-4, atol=1e-5)


def test_paddings_differ_on_even_images_with_stride_two():
    x = images_like(1, 6, 6, 2)
    same = StdConv(4, 3, stride=2, padding='same')
    params, apply = drawn(same, x), jax.jit(same.apply)
    symmetric = jax.jit(same.clone(padding='symmetric').apply)({'params': params}, x)
    shifted = np.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))[:, :6, :6]
    assert symmetric.shape == (1, 3, 3, 4)
    found, moved = (np.asarray(apply({'params': params}, y)) for y in (x, shifted))
    np.testing.assert_allclose(moved[:, :2, :2], symmetric[:, :2, :2], atol=1e-5)
    assert np.abs(found - symmetric).max() > 0.1


@pytest.mark.slow
def test_bfloat16_computes_close_to_float32_with_float32_statistics():
    model, images = Model(num_classes=5, layers=(2,)), images_like(2, 32, 32, 3)
    # bfloat16 has 8 bits: a relative error of 2^-8 at each of some ten roundings. There are seven
    # norms: three a block, and the last.
    precision.assert_bfloat16_is_close(
        model, drawn(model, IMAGES), images, 'features', 0.05, norms=7, convs=8
    )


@pytest.mark.slow
def test_gradients_are_finite_and_reach_every_parameter():
    model = Model(num_classes=5, layers=(2,))
    images = images_like(2, 16, 24, 3)
    precision.assert_gradients_reach_all(model, drawn(model, IMAGES), images)


@pytest.mark.slow
def test_the_head_starts_at_zero():
    model = Model(num_classes=5, layers=(1,))
    images = images_like(2, 16, 16, 3)
    outputs, _ = jax.jit(model.init_with_output)(jax.random.key(0), images)
    np.testing.assert_array_equal(outputs['logits'], np.zeros((2, 5)))


@pytest.mark.slow
def test_flops_are_those_of_the_convolutions_and_the_head():
    def macs(layers, side, num_classes):
        side //= 2
        total = side**2 * 7 * 7 * 3 * 64
        side, inputs = side // 2, 64
        for i, depth in enumerate(layers):
            width = 64 * 2**i
            for j in range(depth):
                before = side**2
                side = side // 2 if i > 0 and j == 0 else side
                after = side**2
                total += before * inputs * width + after * (9 * width + 4 * width) * width
                total += after * inputs * 4 * width * (j == 0)
                inputs = 4 * width
        return total + inputs * num_classes

    model = Model(num_classes=1000, **variant('R50x1'))
    counted = flops.forward_flops(model, spec(1, 224, 224, 3))
    assert counted == 2 * macs((3, 4, 6, 3), 224, 1000)
    # ResNet-50 with the stride on the 3 x 3 convolution: 4.1 G multiply-accumulates.
    assert counted == pytest.approx(2 * 4.1e9, rel=0.02)


def test_variant_gives_keywords_of_the_model():
    assert variant('R152x4') == {'layers': (3, 8, 36, 3), 'width_factor': 4}
    assert Model(**variant('R50x1')) == Model()


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: variant('R50x2'), r"unknown BiT variant 'R50x2'; .* 'R50x"),
        (lambda: Model(dtype='bf16'), r"unknown dtype 'bf16'; .* 'bfloat16'"),
        (lambda: Model(width_factor=0), r'width_factor .* 1, not 0'),
        (lambda: Model(layers=(3, 0)), r'layers \(3, 0\):'),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(UserError, match=message):
        call()
