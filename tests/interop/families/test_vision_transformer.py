"""Files of vision_transformer and big_vision in every form, against models of stock Flax modules.

Flax itself names the children of those models, so they say what the names in such files mean.
"""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers.messages import mentions, says
from helpers.round_trips import anew

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError, resolve
from vit_jax.interop.families import vision_transformer

WIDTH, HEADS, MLP, DEPTH, CLASSES = 16, 2, 24, 2, 5


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(MLP)(x))
        return nn.Dense(x.shape[-1])(y)


class Encoder1DBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x += nn.MultiHeadDotProductAttention(num_heads=HEADS)(y := nn.LayerNorm()(x), y)
        return x + MlpBlock()(nn.LayerNorm()(x))


class PositionEmbedding(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param('pos_embedding', nn.initializers.normal(), (1, *x.shape[1:]))


class Encoder(nn.Module):
    positions: bool

    @nn.compact
    def __call__(self, x):
        if self.positions:
            x = PositionEmbedding(name='posembed_input')(x)
        for i in range(DEPTH):
            x = Encoder1DBlock(name=f'encoderblock_{i}')(x)
        return nn.LayerNorm(name='encoder_norm')(x)


class MAPHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        probe = self.param('probe', nn.initializers.normal(), (1, 1, x.shape[-1]))
        probe = jnp.tile(probe, (len(x), 1, 1))
        x = nn.MultiHeadDotProductAttention(num_heads=HEADS)(probe, x)
        return (x + MlpBlock()(nn.LayerNorm()(x)))[:, 0]


class StdConv(nn.Module):
    features: int
    size: int = 1
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        w = self.param('kernel', nn.initializers.lecun_normal(), shape)
        w = (w - w.mean((0, 1, 2))) / (w.std((0, 1, 2)) + 1e-5)
        numbers = ('NHWC', 'HWIO', 'NHWC')
        strides = (self.stride, self.stride)
        return jax.lax.conv_general_dilated(x, w, strides, 'SAME', dimension_numbers=numbers)


class Unit(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.GroupNorm(name='gn1')(StdConv(self.features, name='conv1')(x)))
        y = StdConv(self.features, 3, self.stride, name='conv2')(y)
        y = nn.relu(nn.GroupNorm(name='gn2')(y))
        y = nn.GroupNorm(name='gn3')(StdConv(4 * self.features, name='conv3')(y))
        if x.shape != y.shape:
            x = StdConv(4 * self.features, 1, self.stride, name='conv_proj')(x)
            x = nn.GroupNorm(name='gn_proj')(x)
        return nn.relu(x + y)


class Stage(nn.Module):
    units: int
    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.units):
            x = Unit(self.features, self.stride if i == 0 else 1, name=f'unit{i + 1}')(x)
        return x


class Reference(nn.Module):
    """`top` is big_vision's place of the positions: before the class token joins."""

    patch: int = 4
    pool: str = 'cls'
    top: bool = False
    representation: int = 0
    classes: int = CLASSES
    layers: tuple[int, ...] | None = None

    @nn.compact
    def __call__(self, x):
        if self.layers is not None:
            x = nn.relu(nn.GroupNorm(name='gn_root')(StdConv(64, 7, 2, name='conv_root')(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), 'SAME')
            for i, units in enumerate(self.layers):
                x = Stage(units, 64 * 2**i, 1 if i == 0 else 2, name=f'block{i + 1}')(x)
        patch = (self.patch, self.patch)
        x = nn.Conv(WIDTH, patch, patch, 'VALID', name='embedding')(x)
        x = x.reshape(len(x), -1, WIDTH)
        if self.top:
            x += self.param('pos_embedding', nn.initializers.normal(), (1, *x.shape[1:]))
        if self.pool == 'cls':
            token = self.param('cls', nn.initializers.normal(), (1, 1, WIDTH))
            x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x = Encoder(not self.top, name='Transformer')(x)
        x = {'cls': lambda: x[:, 0], 'gap': lambda: x.mean(1), 'map': lambda: MAPHead()(x)}[
            self.pool
        ]()
        if self.representation:
            x = nn.tanh(nn.Dense(self.representation, name='pre_logits')(x))
        return nn.Dense(self.classes, name='head')(x) if self.classes else x


def flat_params(tree):
    return flatten_dict(tree, sep='/')


@functools.cache
def compiled(model):
    return jax.jit(model.apply)


def logits(imported, images):
    fields = {k: v for k, v in imported.model_config.items() if k != 'name'}
    model = resolve('vit_jax.models', imported.model_config['name'], 'Model')(**fields)
    with jax.default_matmul_precision('highest'):
        outputs = compiled(model)({'params': imported.params}, images)
    return outputs['logits' if model.num_classes else 'pre_logits']


def expected_logits(reference, params, images):
    with jax.default_matmul_precision('highest'):
        return compiled(reference)({'params': params}, images)


def pre_linen(flat):
    """Names of Flax before Linen: all children of a block are counted together."""
    numbers = {
        'LayerNorm_1': 'LayerNorm_2',
        'MultiHeadDotProductAttention_0': 'MultiHeadDotProductAttention_1',
        'MlpBlock_0': 'MlpBlock_3',
    }

    def rename(name):
        if 'encoderblock' not in name:
            return name
        return re.sub('|'.join(numbers), lambda old: numbers[old[0]], name)

    return {rename(name): array for name, array in flat.items()}


def old_group_norms(flat):
    is_norm = re.compile(r'(.*/)?gn(\d|_root|_proj)/(scale|bias)')
    return {n: a.reshape(1, 1, 1, -1) if is_norm.fullmatch(n) else a for n, a in flat.items()}


def positions_in_encoder(flat):
    old, new = 'Transformer/posembed_input/pos_embedding', 'Transformer/pos_embedding'
    return {new if n == old else n: a for n, a in flat.items()}


def combined_positions_at_top(flat):
    old = 'Transformer/posembed_input/pos_embedding'
    return {'pos_embedding' if n == old else n: a for n, a in flat.items()}


def inlined_head(flat):
    return {name.removeprefix('MAPHead_0/'): array for name, array in flat.items()}


def scanned(flat):
    """As nn.scan stores blocks: one, stacked on axis 0."""
    first = 'Transformer/encoderblock_0/'
    stacks = {}
    for name in flat:
        if name.startswith(first):
            layers = [flat[name.replace('block_0', f'block_{i}')] for i in range(DEPTH)]
            stacks[name.replace('block_0', 'block')] = np.stack(layers)
    return {n: a for n, a in flat.items() if 'encoderblock_' not in n} | stacks


def training_state(flat):
    optimizer = {f'opt/0/mu/{name}': np.zeros_like(a) for name, a in flat.items()}
    return {**{f'params/{n}': a for n, a in flat.items()}, **optimizer, 'chrono/step': np.int64(3)}


def target_of_optimizer(flat):
    return {f'opt/target/{n}': a for n, a in flat.items()} | {'opt/state/step': np.int64(3)}


def unchanged(flat):
    return flat


FORMS = {
    'linen': ({}, unchanged),
    'pre-Linen': ({}, pre_linen),
    'representation': ({'representation': 12}, pre_linen),
    'gap': ({'pool': 'gap'}, unchanged),
    'no head': ({'classes': 0}, unchanged),
    'positions in the encoder': ({}, positions_in_encoder),
    'combined positions at the top': ({}, combined_positions_at_top),
    'big_vision class token': ({'top': True}, unchanged),
    'big_vision gap': ({'top': True, 'pool': 'gap'}, unchanged),
    'big_vision map': ({'top': True, 'pool': 'map'}, unchanged),
    'big_vision old map': ({'top': True, 'pool': 'map'}, inlined_head),
    'big_vision scanned': ({'top': True, 'pool': 'map', 'representation': 12}, scanned),
    'training state': ({'top': True, 'pool': 'gap'}, training_state),
    'optimizer': ({}, target_of_optimizer),
    'R': ({'layers': (), 'patch': 2}, unchanged),
    'R+': ({'layers': (1, 2), 'patch': 1}, lambda flat: old_group_norms(pre_linen(flat))),
}


# Each is part of another form: 'gap' of images that are not square, 'R' of 'R+'.
COVERED = ('representation', 'gap', 'R')


@pytest.mark.slow
@pytest.mark.parametrize(
    'form',
    [pytest.param(x, marks=pytest.mark.long) if x in COVERED else x for x in FORMS],
)
def test_logits_of_every_form(form, tmp_path, images, perturbed):
    fields, change = FORMS[form]
    reference, batch = Reference(**fields), images(2, 24, 24, 3)
    params = perturbed(reference, batch)
    np.savez(tmp_path / 'a.npz', **change(flat_params(params)))
    imported = interop.read(tmp_path / 'a.npz')
    np.testing.assert_allclose(
        logits(imported, batch), expected_logits(reference, params, batch), atol=2e-5
    )
    assert imported.image_size == (24, 24)
    assert (
        imported.model_config['name']
        == imported.model_config['name']
        == ('hybrid' if 'R' in form[:1] else 'vit')
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('pool', 'size'),
    [
        ('cls', (8, 16)),  # with the token as many as in a square
        ('gap', (8, 20)),
        pytest.param('cls', (12, 20), marks=pytest.mark.long),
        pytest.param('cls', (8, 20), marks=pytest.mark.long),
        pytest.param('gap', (8, 16), marks=pytest.mark.long),
        pytest.param('gap', (12, 20), marks=pytest.mark.long),
    ],
)
def test_images_that_are_not_square(size, pool, tmp_path, images, perturbed):
    reference, batch = Reference(pool=pool), images(2, *size, 3)
    params = perturbed(reference, batch)
    np.savez(tmp_path / 'a.npz', **flat_params(params))
    imported = interop.read(str(tmp_path / 'a.npz'))
    np.testing.assert_allclose(
        logits(imported, batch), expected_logits(reference, params, batch), atol=1e-5
    )
    assert imported.image_size is None


@pytest.mark.slow
def test_gray_images(tmp_path, images, perturbed):
    reference, batch = Reference(), images(2, 8, 8, 1)
    params = perturbed(reference, batch)
    np.savez(tmp_path / 'a.npz', **flat_params(params))
    result = logits(interop.read(tmp_path / 'a.npz'), batch)
    np.testing.assert_allclose(result, expected_logits(reference, params, batch), atol=1e-5)


@pytest.mark.slow
def test_fixed_positions_are_in_no_file(tmp_path, images, perturbed, capsys):
    params = flat_params(perturbed(Reference(top=True, pool='gap'), images(1, 8, 8, 3)))
    del params['pos_embedding']
    np.savez(tmp_path / 'a.npz', **params)
    imported = interop.read(tmp_path / 'a.npz')
    assert imported.model_config['posemb'] == 'sincos2d' and imported.image_size is None
    assert logits(imported, images(1, 8, 12, 3)).shape == (1, CLASSES)
    # Neither that they are fixed, nor how tokens are pooled, is told: it is said.
    assert cli.main(['convert', str(tmp_path / 'a.npz'), str(tmp_path / 'b.npz')]) == 0
    printed = capsys.readouterr().out
    assert mentions(printed, 'embedding', 'sincos2d')
    assert mentions(printed, 'pool_type', "'gap'")


@pytest.mark.slow
def test_old_files_without_positions_are_of_models_without(tmp_path, images, perturbed, capsys):
    """`add_position_embedding=False` of vision_transformer; sincos2d came with big_vision."""
    reference, batch = Reference(), images(2, 12, 12, 3)
    params = jax.tree.map(np.asarray, perturbed(reference, batch))
    table = params['Transformer']['posembed_input']['pos_embedding']
    params['Transformer']['posembed_input']['pos_embedding'] = np.zeros_like(table)
    flat = pre_linen(flat_params(params))
    del flat['Transformer/posembed_input/pos_embedding']
    np.savez(tmp_path / 'a.npz', **flat)
    imported = interop.read(tmp_path / 'a.npz')
    expected = expected_logits(reference, params, batch)
    np.testing.assert_allclose(logits(imported, batch), expected, atol=1e-5)
    assert imported.model_config['posemb'] == 'none'
    assert mentions(imported.notes[0], 'assumed', 'positions')
    with pytest.raises(UserError, match="posemb 'none'"):
        interop.write(anew(imported), tmp_path / 'b.npz')
    # transformers' BEiT may be without positions; it does not tell the size of images.
    with pytest.raises(UserError, match=r'follow.*pos_embed'):
        interop.write(anew(imported), tmp_path / 'b')
    interop.write(dataclasses.replace(imported, image_size=(12, 12)), tmp_path / 'c')
    np.testing.assert_allclose(logits(interop.read(tmp_path / 'c'), batch), expected, atol=1e-5)


def test_the_whole_architecture_is_read_off_the_shapes(tmp_path, images, perturbed):
    params = perturbed(Reference(representation=12), images(1, 8, 8, 3))
    np.savez(tmp_path / 'a.npz', **flat_params(params))
    imported = interop.read(tmp_path / 'a.npz')
    assert imported.model_config == {
        'name': 'vit',
        'num_classes': CLASSES,
        'patch_size': 4,
        'width': WIDTH,
        'depth': DEPTH,
        'mlp_dim': MLP,
        'num_heads': HEADS,
        'pool': 'cls',
        'fc_norm': False,
        'posemb': 'learn',
        'representation_size': 12,
        'gelu': 'tanh',
        'norm_eps': 1e-6,
    }
    leaves = jax.tree.leaves(imported.params)
    assert all(type(leaf) is np.ndarray and leaf.dtype == np.float32 for leaf in leaves)
    assert imported.source == 'vision_transformer npz'


@pytest.mark.slow
def test_a_hybrid_says_its_layers(tmp_path, images, perturbed):
    params = perturbed(Reference(layers=(1, 2), patch=1), images(1, 16, 16, 3))
    np.savez(tmp_path / 'a.npz', **flat_params(params))
    model = interop.read(tmp_path / 'a.npz').model_config
    assert (model['name'], model['layers'], model['patch_size']) == ('hybrid', (1, 2), 1)


@pytest.mark.slow
def test_a_part_of_a_file_in_half_precision(tmp_path, images, perturbed):
    """An image tower beside a text tower, in bfloat16, which NumPy stores as two raw bytes."""
    reference, batch = Reference(top=True, pool='map'), images(2, 24, 24, 3)
    params = perturbed(reference, batch)
    half = {n: a.astype(ml_dtypes.bfloat16) for n, a in flat_params(params).items()}
    tower = {f'params/img/{n}': a for n, a in half.items()}
    np.savez(tmp_path / 'a.npz', **tower, **{'params/txt/kernel': np.zeros(3), 't': np.zeros(1)})
    with np.load(tmp_path / 'a.npz') as file:
        assert file['params/img/embedding/kernel'].dtype == 'V2'
    rounded = unflatten_dict({n: a.astype(np.float32) for n, a in half.items()}, sep='/')
    result = logits(interop.read(f'{tmp_path}/a.npz:img'), batch)
    np.testing.assert_allclose(result, expected_logits(reference, rounded, batch), atol=1e-5)
    with pytest.raises(UserError, match=r"'image'.*img, txt"):
        interop.read(f'{tmp_path}/a.npz:image')


WRITTEN = {
    'cls': {},
    'representation': {'representation_size': 12},
    'gap': {'pool': 'gap'},
    'map': {'pool': 'map'},
    'scan': {'scan': True},
    'no head': {'num_classes': None},
    'hybrid': {'name': 'hybrid', 'layers': (1, 1), 'patch_size': 1},
}


@pytest.mark.slow
@pytest.mark.parametrize('form', WRITTEN)
def test_what_is_written_is_read_by_stock_flax_and_by_us(form, images, perturbed):
    fields = {
        'name': 'vit',
        'num_classes': CLASSES,
        'patch_size': 4,
        'width': WIDTH,
        'depth': DEPTH,
        'mlp_dim': MLP,
        'num_heads': HEADS,
        **WRITTEN[form],
    }
    name = fields.pop('name')
    model, batch = resolve('vit_jax.models', name, 'Model')(**fields), images(2, 24, 24, 3)
    params = perturbed(model, batch)
    with jax.default_matmul_precision('highest'):
        outputs = compiled(model)({'params': params}, batch)
    expected = outputs['logits' if model.num_classes else 'pre_logits']

    written = vision_transformer.write(params, {'name': name, **fields})
    reference = Reference(
        patch=model.patch_size,
        pool=model.pool.kind,
        representation=model.head.representation_size or 0,
        classes=model.num_classes or 0,
        layers=fields.get('layers'),
    )
    tree = unflatten_dict(written, sep='/')
    shapes = jax.tree.map(jnp.shape, tree)
    assert shapes == jax.tree.map(jnp.shape, perturbed(reference, batch))
    np.testing.assert_allclose(expected_logits(reference, tree, batch), expected, atol=2e-5)
    again = vision_transformer.read(written, {})
    np.testing.assert_allclose(logits(again, batch), expected, atol=2e-5)


def test_what_a_file_cannot_say():
    assert vision_transformer.losses({'name': 'vit'}) == []
    assert vision_transformer.losses({'gelu': 'tanh', 'norm_eps': 1e-6}) == []
    first, second = vision_transformer.losses({'gelu': 'erf', 'norm_eps': 1e-12})
    assert says(first, 'gelu tanh', 'erf')
    assert says(second, 'norm_eps 1e-06', '1e-12')


def without(*names):
    return lambda flat: {n: a for n, a in flat.items() if n not in names}


def with_shape(name, *shape):
    return lambda flat: {**flat, name: np.zeros(shape)}


BLOCK = 'Transformer/encoderblock_1'
MISTAKES = {
    'unknown': (with_shape(f'{BLOCK}/gamma', 3), f'no part called {BLOCK}/gamma'),
    'absent leaf': (
        without(f'{BLOCK}/MlpBlock_0/Dense_1/bias'),
        rf'{BLOCK}/MlpBlock_0/Dense_1/bias \(16,\) is missing',
    ),
    'absent query': (
        without('Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel'),
        'encoderblock_0/MultiHeadDotProductAttention_0/query/kernel is not in the file',
    ),
    'absent norm': (
        without('Transformer/encoder_norm/scale'),
        r'encoder_norm/scale \(16,\) is missing',
    ),
    'shape': (
        with_shape(f'{BLOCK}/MlpBlock_0/Dense_0/kernel', 16, 25),
        rf'{BLOCK}/MlpBlock_0/Dense_0/kernel has shape \(16, 25\) instead of \(16, 24\)',
    ),
    'rank': (
        with_shape('embedding/kernel', 4, 16),
        r'embedding/kernel cannot have shape \(4, 16\)',
    ),
    'patches': (with_shape('embedding/kernel', 4, 5, 3, 16), 'patches of 5 x 4 pixels'),
    'positions': (
        with_shape('Transformer/posembed_input/pos_embedding', 1, 5, 17),
        r'pos_embedding has shape \(1, 5, 17\)',
    ),
    'two class tokens': (
        with_shape('MAPHead_0/probe', 1, 1, 16),
        r'MAPHead_0/\S+ \(.*\) is missing',
    ),
    'twice': (
        with_shape(f'{BLOCK}/LayerNorm_2/scale', 16),
        f'{BLOCK}/LayerNorm_1/scale and {BLOCK}/LayerNorm_2/scale mean the same',
    ),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_mistakes_name_the_parameter_of_the_file(mistake, tmp_path, images, perturbed):
    change, words = MISTAKES[mistake]
    flat = flat_params(perturbed(Reference(), images(1, 8, 8, 3)))
    np.savez(tmp_path / 'a.npz', **change(flat))
    with pytest.raises(UserError, match=words) as error:
        interop.read(tmp_path / 'a.npz')
    assert '\n' not in str(error.value) and 'a.npz: ' in str(error.value)


def test_a_model_that_is_not_known(tmp_path):
    np.savez(tmp_path / 'a.npz', **{'stem/kernel': np.zeros(3), 'a': np.zeros(1)})
    words = r'no checkpoint family .*found a, stem/kernel.*tried authors_.* bit,'
    with pytest.raises(UserError, match=words):
        interop.read(tmp_path / 'a.npz')


@pytest.mark.parametrize(
    'field',
    [{'pool': 'patches'}, {'head_norm': 'batch'}, {'fc_norm': True}, {'final_norm': False}],
)
def test_models_that_its_readers_would_take_for_others(field):
    ((name, value),) = field.items()
    with pytest.raises(UserError, match=f'{name} {value!r}'):
        vision_transformer.write({}, {'name': 'vit', **field})
