"""FLOPs from the jaxpr against closed forms; peaks of devices."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from vit_jax.models import vit
from vit_jax.profiling import flops

pytestmark = pytest.mark.slow  # as a whole


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def vit_macs(name, image_size, classes, class_token=True, channels=3, **fields):
    """MACs of one image: patches, projections and MLPs, the two T^2 products, the head."""
    v = vit.variant(name) | fields
    patch, width, depth, mlp = (v[k] for k in ('patch_size', 'width', 'depth', 'mlp_dim'))
    patches = (image_size // patch) ** 2
    tokens = patches + class_token
    return (
        patches * channels * patch**2 * width
        + depth * tokens * (4 * width**2 + 2 * width * mlp)
        + depth * 2 * tokens**2 * width
        + width * classes
    )


@pytest.mark.parametrize(
    ('name', 'image_size', 'gmacs'),
    [
        ('Ti/16', 224, 1.254),
        pytest.param('S/32', 224, 1.143, marks=pytest.mark.long),
        ('S/16', 224, 4.599),
        pytest.param('B/32', 224, 4.409, marks=pytest.mark.long),
        pytest.param('B/16', 224, 17.564, marks=pytest.mark.long),
        ('B/16', 384, 55.48),
        pytest.param('L/16', 224, 61.555, marks=pytest.mark.long),
        ('H/14', 224, 167.3),
        pytest.param('g/14', 224, 267.0, marks=pytest.mark.long),
        ('G/14', 224, 483.7),
    ],
)
def test_vit_by_closed_form(name, image_size, gmacs):
    # Scanned, so that the deepest is traced as quickly as the shallowest.
    model = vit.Model(num_classes=1000, scan=True, **vit.variant(name))
    counted = flops.forward_flops(model, spec(1, image_size, image_size, 3))
    assert counted == 2 * vit_macs(name, image_size, 1000)
    assert counted / 2e9 == pytest.approx(gmacs, rel=5e-4)


def test_vit_without_class_token():
    model = vit.Model(num_classes=1000, pool='gap', scan=True, **vit.variant('B/16'))
    counted = flops.forward_flops(model, spec(2, 224, 224, 3))
    assert counted == 2 * 2 * vit_macs('B/16', 224, 1000, class_token=False)
    assert counted / 4e9 == pytest.approx(17.472, rel=1e-4)


SHALLOW = {'depth': 3}


@pytest.mark.parametrize('options', [{}, {'scan': True}, {'remat': True}, {'dtype': 'bfloat16'}])
def test_the_forward_pass_does_not_depend_on_how_it_is_compiled(options):
    plain = vit.Model(num_classes=10, **vit.variant('Ti/16') | SHALLOW)
    counted = flops.forward_flops(plain.clone(**options), spec(2, 64, 64, 3))
    assert counted == 2 * 2 * vit_macs('Ti/16', 64, 10, **SHALLOW)


@pytest.mark.parametrize(
    ('options', 'forwards'), [({}, 0), ({'remat': True}, 1), ({'remat': 'dots'}, 0.02)]
)
def test_gradients_cost_twice_the_forward_pass_and_remat_recomputes_the_blocks(options, forwards):
    model = vit.Model(num_classes=10, **vit.variant('Ti/16') | SHALLOW, **options)
    images = spec(2, 64, 64, 3)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((2, 64, 64, 3))))

    def loss(variables, images):
        rngs = {'dropout': jax.random.key(0)}
        return model.apply(variables, images, train=True, rngs=rngs)['logits'].sum()

    macs = 2 * vit_macs('Ti/16', 64, 10, **SHALLOW)
    patches = 2 * 16 * 3 * 16**2 * 192  # nobody asks for the gradient of the image
    outside = patches + 2 * 192 * 10
    assert flops.count_flops(loss, variables, images) == 2 * macs
    counted = flops.count_flops(jax.grad(loss), variables, images)
    wanted = 2 * (flops.TRAIN_TO_FORWARD * macs - patches)
    recomputed = forwards * 2 * (macs - outside)
    # The last product of a block is needed by no gradient, so it may be left out.
    assert wanted + 0.6 * recomputed <= counted <= wanted + recomputed


def test_products():
    assert flops.count_flops(jnp.matmul, spec(3, 5), spec(5, 7)) == 2 * 3 * 5 * 7
    batched = lambda a, b: jnp.einsum('bij,bjk->bik', a, b)  # noqa: E731
    assert flops.count_flops(batched, spec(4, 3, 5), spec(4, 5, 7)) == 4 * 2 * 3 * 5 * 7
    assert flops.count_flops(jax.jit(jnp.tanh), spec(3, 5)) == 0


def conv(**options):
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    ('options', 'kernel', 'outputs', 'terms'),
    [
        ({'window_strides': (1, 1), 'padding': 'SAME'}, (3, 3, 6, 8), 2 * 12 * 12 * 8, 9 * 6),
        ({'window_strides': (2, 2), 'padding': 'SAME'}, (3, 3, 6, 8), 2 * 6 * 6 * 8, 9 * 6),
        ({'window_strides': (4, 4), 'padding': 'VALID'}, (4, 4, 6, 8), 2 * 3 * 3 * 8, 16 * 6),
        (
            {'window_strides': (1, 1), 'padding': 'SAME', 'feature_group_count': 6},
            (3, 3, 1, 6),
            2 * 12 * 12 * 6,
            9,
        ),
        (
            {'window_strides': (1, 1), 'padding': 'SAME', 'rhs_dilation': (2, 2)},
            (3, 3, 6, 8),
            2 * 12 * 12 * 8,
            9 * 6,
        ),
    ],
)
def test_convolutions(options, kernel, outputs, terms):
    counted = flops.count_flops(conv(**options), spec(2, 12, 12, 6), spec(*kernel))
    assert counted == 2 * outputs * terms


def test_gradients_of_a_patch_convolution_cost_what_it_costs():
    def loss(x, w):
        return (conv(window_strides=(4, 4), padding='VALID')(x, w) ** 2).sum()

    args = spec(2, 12, 12, 6), spec(4, 4, 6, 8)
    forward = flops.count_flops(loss, *args)
    assert flops.count_flops(jax.grad(loss, argnums=(0, 1)), *args) == 3 * forward


def test_loops_count_their_trips():
    def scanned(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, length=5)[0]

    def looped(x, w):
        return lax.fori_loop(0, 5, lambda _, c: c @ w, x)

    def unbounded(x, w):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x)

    args = spec(3, 4), spec(4, 4)
    assert flops.count_flops(scanned, *args) == 5 * 2 * 3 * 4 * 4
    assert flops.count_flops(looped, *args) == 5 * 2 * 3 * 4 * 4
    with pytest.raises(ValueError, match='trip count'):
        flops.count_flops(unbounded, *args)
    # Sampling loops without products are free: mixup's Beta variable is one.
    assert flops.count_flops(lambda k: jax.random.beta(k, 0.2, 0.2), jax.random.key(0)) == 0


def test_of_a_conditional_the_dearer_branch_counts():
    def either(x, w):
        return lax.cond(x.sum() > 0, lambda: x, lambda: (x @ w) @ w)

    assert flops.count_flops(either, spec(3, 4), spec(4, 4)) == 2 * 2 * 3 * 4 * 4


def test_custom_gradients_are_entered():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    args = spec(3, 4), spec(4, 5)
    loss = lambda x, w: product(x, w).sum()  # noqa: E731
    assert flops.count_flops(loss, *args) == 2 * 3 * 4 * 5
    assert flops.count_flops(jax.grad(loss, argnums=(0, 1)), *args) == 3 * 2 * 3 * 4 * 5


def test_mapped_code_counts_on_every_device():
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P('d'), P()), out_specs=P('d'))
    args = spec(4 * devices, 3), spec(3, 5)
    assert flops.count_flops(mapped, *args) == flops.count_flops(jnp.matmul, *args)
    replicas = spec(devices, 4, 3)
    assert flops.count_flops(jax.pmap(lambda x: x @ x.T), replicas) == devices * 2 * 4 * 4 * 3


@pytest.mark.parametrize(
    ('kind', 'teraflops'),
    [
        ('NVIDIA H200', 989),
        ('NVIDIA H100 80GB HBM3', 989),
        ('NVIDIA H100 PCIe', 756),
        ('NVIDIA A100-SXM4-80GB', 312),
        ('NVIDIA A10', 125),
        ('NVIDIA L4', 121),
        ('TPU v3', 61.5),
        ('TPU v4', 275),
        ('TPU v5 lite', 197),
        ('TPU v5', 459),
        ('TPU v5p', 459),
        ('TPU v6 lite', 918),
        ('TPU7x', 1153.5),
        ('NVIDIA B300 SXM6 AC', 2250),
        ('NVIDIA GB200', 2500),
        ('NVIDIA B200', 2250),
        ('NVIDIA GeForce RTX 4090', 165.2),
        ('NVIDIA GeForce RTX 5090', 209.5),
        ('NVIDIA RTX PRO 6000 Blackwell Server Edition', 503.8),
        ('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', 438.9),
        ('Tesla V100-SXM2-16GB', 125),
        ('Tesla V100-PCIE-32GB', 112),
        ('Tesla T4', 65),
        ('AMD Instinct MI300X', 1307.4),
    ],
)
def test_peaks(kind, teraflops):
    assert flops.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize(
    'kind',
    [
        'cpu',
        'NVIDIA GeForce RTX 4090 Laptop GPU',
        'NVIDIA GeForce RTX 5090 D',
        'NVIDIA RTX A1000',
        'NVIDIA A100-SXM4-40GB MIG 1g.5gb',
        'TPU v4 lite',
        'TPU v9',
    ],
)
def test_unknown_peaks_are_none_rather_than_near(kind):
    assert flops.peak_flops(kind) is None
    assert flops.mfu(1e12, 1.0, 1, kind) is None


def test_mfu():
    # ViT-B/16 at 224 trains 3,755 images/s on an H200 at 40 % (2 * 3 * 17.564 GFLOP an image).
    per_image = flops.TRAIN_TO_FORWARD * 2 * vit_macs('B/16', 224, 1000)
    assert flops.mfu(per_image * 3755, 1.0, 1, 'NVIDIA H200') == pytest.approx(0.4, abs=1e-3)
    assert flops.mfu(8 * 312e12, 2.0, 8, 'NVIDIA A100-SXM4-80GB') == 0.5
