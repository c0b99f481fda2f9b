"""NaFlex: padding changes nothing, images are as alone, positions are stretched; exact counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.models import vit
from vit_jax.models.naflex import Model
from vit_jax.nn.maps import AttentionMap
from vit_jax.nn.patches import PatchDropout, patchify
from vit_jax.nn.positions import resized
from vit_jax.ops import resize
from vit_jax.ops.sequences import Sequences
from vit_jax.step import init_state, init_variables, make_train_step
from vit_jax.tasks.classify import Task

TINY = {'patch_size': 4, 'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 2, 'num_classes': 3}
TINY |= {'pos_grid': 5}
GRIDS = np.array([[2, 3], [4, 1], [1, 1], [3, 3]])
SHAPES = Sequences(jax.ShapeDtypeStruct((4, 12, 48), 'f4'), jax.ShapeDtypeStruct((4, 2), 'i4'))


def drawn(model, seed=1):
    """Parameters none of which is at its initial zero or one."""
    tree = jax.eval_shape(model.init, jax.random.key(0), SHAPES)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: 0.3 * rng.standard_normal(p.shape, np.float32), tree)


def drawn_sequences(padding, seed=0):
    """The same images with `padding` random patches after the longest."""
    values = np.random.default_rng(seed).standard_normal((4, 9, 48)).astype(np.float32)
    noise = np.random.default_rng(padding).standard_normal((4, 9 + padding, 48))
    real = np.arange(9 + padding) < GRIDS.prod(axis=1)[:, None]
    values = np.pad(values, ((0, 0), (0, padding), (0, 0)))
    return Sequences(jnp.where(real[..., None], values, 50 * noise), jnp.asarray(GRIDS))


@pytest.mark.parametrize('name', ['B/16', 'So400m/14'])
def test_parameters_are_those_of_a_vit_for_images_of_the_table(name):
    keywords = vit.variant(name) | {'num_classes': 1000, 'pool': 'map', 'scan': True}
    size = 16 * keywords['patch_size']

    def count(model, images):
        made = jax.eval_shape(model.init, jax.random.key(0), images)
        return sum(leaf.size for leaf in jax.tree.leaves(made))

    values = keywords['patch_size'] ** 2 * 3
    sequences = Sequences(jnp.zeros((1, 7, values)), jnp.ones((1, 2), int))
    found = count(Model(**keywords), sequences)
    assert found == count(vit.Model(**keywords), jnp.zeros((1, size, size, 3)))
    assert found == {'B/16': 93_699_304, 'So400m/14': 428_833_704}[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    'fields',
    [
        {'pool': 'map'},
        pytest.param(
            {'pool': 'gap', 'scan': True, 'residual_dtype': 'float32'}, marks=pytest.mark.long
        ),
        pytest.param({'pool': 'cls', 'registers': 2}, marks=pytest.mark.long),
    ],
)
def test_padding_changes_nothing_and_each_image_is_as_alone(fields):
    model = Model(**TINY, **fields)
    variables, apply = drawn(model), jax.jit(model.apply)
    few, many = (apply(variables, drawn_sequences(n))['logits'] for n in (0, 5))
    np.testing.assert_allclose(few, many, atol=1e-6)
    assert np.std(few) > 0.01
    # In the order of a smaller batch, without the other images.
    values, grid = drawn_sequences(0)
    alone = apply(variables, Sequences(values[:1, :6], grid[:1]))['logits']
    np.testing.assert_allclose(few[:1], alone, atol=1e-6)


def test_padding_gets_no_gradient():
    model, sequences = Model(**TINY), drawn_sequences(3)
    variables = jax.tree.map(jnp.asarray, drawn(model))

    def loss(values):
        return model.apply(variables, sequences._replace(values=values))['logits'].std()

    found = np.asarray(jax.jit(jax.grad(loss))(sequences.values))
    assert not np.any(found[~np.asarray(sequences.real)])
    assert np.all(np.any(found, axis=2)[np.asarray(sequences.real)])


def test_images_of_the_size_of_the_table_are_those_of_a_vit():
    images = np.random.default_rng(0).standard_normal((2, 20, 20, 3)).astype(np.float32)
    model, plain = Model(**TINY), {k: v for k, v in TINY.items() if k != 'pos_grid'}
    variables = drawn(model)
    found = jax.jit(model.apply)(variables, images)['logits']
    expected = jax.jit(vit.Model(**plain, pool='map').apply)(variables, images)['logits']
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize('grid', [(1, 1), (5, 5), (3, 7), (8, 2), (1, 90)])
def test_positions_are_stretched_over_the_grid(grid):
    table = np.random.default_rng(0).standard_normal((5, 4, 8)).astype(np.float32)
    tokens = grid[0] * grid[1]
    run = jax.jit(resized, static_argnums=2)
    found = np.asarray(run(table, np.array([grid, (2, 2)]), tokens + 3))
    expected = resize.bilinear_half_pixel(table, grid).reshape(tokens, 8)
    np.testing.assert_allclose(found[0, :tokens], expected, atol=1e-6)
    assert np.isfinite(found).all()
    assert np.isfinite(run(table, np.zeros((1, 2), np.int32), 2)).all()


def test_patch_dropout_keeps_a_share_of_each_image_and_no_padding():
    real = np.arange(12) < np.array([12, 6, 1])[:, None]
    x = np.where(real, np.arange(1, 13), 0).astype(np.float32)[..., None]
    rngs = {'dropout': jax.random.key(0)}
    apply = jax.jit(functools.partial(PatchDropout(0.5).apply, rngs=rngs))
    kept, now = map(np.asarray, apply({}, x, real))
    assert kept.shape == (3, 6, 1)
    np.testing.assert_array_equal(now.sum(axis=1), [6, 3, 1])
    for row, mask in zip(kept[..., 0], now, strict=True):
        own = row[mask]
        assert len(set(own.tolist())) == len(own) and np.all(own > 0)
    assert not np.array_equal(np.sort(kept[0, :, 0]), np.arange(1, 7))


@pytest.mark.slow
def test_patch_dropout_acts_in_training_alone_and_is_the_example_s_own():
    model, sequences = Model(**TINY, patch_dropout=0.5), drawn_sequences(1)
    variables = drawn(model)
    apply = jax.jit(model.apply, static_argnames='train')
    rngs = {'dropout': jax.random.key(1)}
    train = apply(variables, sequences, train=True, rngs=rngs)
    assert train['tokens'].shape == (4, 5, 16)
    first = Sequences(*(part[:2] for part in sequences))
    half = apply(variables, first, train=True, rngs=rngs)
    np.testing.assert_allclose(train['logits'][:2], half['logits'], atol=1e-6)
    plain = jax.jit(Model(**TINY).apply)(variables, sequences)['logits']
    np.testing.assert_allclose(apply(variables, sequences)['logits'], plain, atol=1e-6)
    assert np.abs(train['logits'][:2] - plain[:2]).max() > 1e-3
    np.testing.assert_allclose(train['logits'][2], plain[2], atol=1e-6)  # of its only patch


def cut(images, side):
    """The sequences of square images."""
    rows = images.shape[1] // side
    return Sequences(patchify(jnp.asarray(images), side), jnp.full((len(images), 2), rows))


@pytest.mark.slow
@pytest.mark.parametrize('side', [pytest.param(4, marks=pytest.mark.long), 8, 11])
def test_enlarged_patches_have_the_outputs_of_the_original(side):
    """FlexiViT, section 3.4: whatever the patches' size, the kernel of 4 pixels is for."""
    small = np.random.default_rng(0).standard_normal((2 * 9, 4, 4, 3)).astype(np.float32)
    large = jax.image.resize(small, (18, side, side, 3), 'linear')
    model, grid = Model(**TINY), jnp.full((2, 2), 3)
    variables = drawn(model)
    expected = jax.jit(model.apply)(variables, Sequences(small.reshape(2, 9, -1), grid))
    flexible = jax.jit(Model(**TINY, kernel_size=4).apply)
    found = flexible(variables, Sequences(large.reshape(2, 9, -1), grid))
    np.testing.assert_allclose(found['logits'], expected['logits'], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('side', [3, 6])
def test_patches_of_another_size_have_the_outputs_of_a_vit_for_them(side):
    """The parameters are brought to the size before, by the reader of checkpoints."""
    flexible = Model(**TINY | {'pool': 'cls'}, kernel_size=4)
    params = drawn(flexible)['params']
    images = np.random.default_rng(0).standard_normal((2, 5 * side, 5 * side, 3)).astype(np.float32)
    plain = {k: v for k, v in TINY.items() if k != 'pos_grid'} | {'patch_size': side}
    model = vit.Model(**plain)
    target = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    fitted, notes = adapt.adapt(params, target, model, new_size=images.shape[1:3])
    assert notes == [f'patch_embed: 4 x 4 resized to {side} x {side}']
    expected = jax.jit(model.apply)({'params': fitted}, images)['logits']
    found = jax.jit(flexible.apply)({'params': params}, cut(images, side))['logits']
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_the_kernel_learns_from_patches_of_every_size():
    model = Model(**TINY, kernel_size=6)
    variables = drawn(model)
    assert variables['params']['patch_embed']['kernel'].shape == (6, 6, 3, 16)
    images = np.random.default_rng(0).standard_normal((2, 24, 24, 3)).astype(np.float32)

    def loss(variables, side):
        return model.apply(variables, cut(images, side))['logits'].std()

    for side in (12, 3):
        found = jax.jit(jax.grad(loss), static_argnums=1)(variables, side)['params']
        assert np.all(np.any(found['patch_embed']['kernel'], axis=(2, 3)))
        assert np.any(found['pos_embed'])


# Of the first three steps of Adam; they change only with the model, its initial values or the loss.
GOLDEN = [1.0986123, 1.0040660, 0.7638811]


@pytest.mark.slow
def test_golden_steps():
    model, task, tx = Model(**TINY, patch_dropout=0.25), Task(), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (4, 12, 48), dtype=np.uint8)
    batch = {'patches': jnp.asarray(values), 'grid': jnp.asarray(GRIDS), 'label': jnp.arange(4) % 3}
    one = jax.tree.map(lambda x: x[:1], batch)

    def start():
        return init_state(init_variables(model, task, one, 0), tx, 0, ema=False)

    state = jax.jit(start)()
    step, losses = jax.jit(make_train_step(model, task, tx)), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    assert losses == pytest.approx(GOLDEN, rel=1e-4)


def test_attention_maps_have_no_padding():
    model = Model(**TINY, registers=1, attention='xla')
    sequences = Sequences(*(part[:1] for part in drawn_sequences(4)))
    look = jax.jit(functools.partial(model.apply, mutable=['intermediates']))
    _, kept = look(drawn(model), sequences)
    maps = model.attention_maps(kept['intermediates'], sequences)
    assert [m.query_grid for m in maps] == [(2, 3), (2, 3)]
    assert maps[0].weights.shape == (1, 2, 7, 7)
    np.testing.assert_allclose(maps[1].weights.sum(axis=-1), 1, atol=1e-6)
    assert isinstance(maps[0], AttentionMap)


@pytest.mark.parametrize('kernel_size', [None, 6])
def test_a_vit_is_the_start_of_a_naflex(kernel_size):
    """Whatever the size of the data's images; patches of another size are resized too."""
    plain = {k: v for k, v in TINY.items() if k != 'pos_grid'} | {'pool': 'map', 'patch_size': 8}
    images = jax.ShapeDtypeStruct((1, 48, 24, 3), np.float32)
    params = jax.eval_shape(vit.Model(**plain).init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda p: np.ones(p.shape, p.dtype), params)
    model = Model(**TINY, kernel_size=kernel_size)
    target = jax.eval_shape(model.init, jax.random.key(0), SHAPES)['params']
    found, notes = adapt.adapt(params, target, model, old_size=(48, 24), new_size=None)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, target)
    assert any('pos_embed' in note for note in notes)


def test_the_picture_of_positions_is_that_of_the_table():
    pictures = Model(**TINY).parameter_pictures(drawn(Model(**TINY))['params'], None)
    assert pictures[0].name == 'pos_embed'


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'posemb': 'sincos2d'}, "embed='learn'"),
        ({'positions': 'rope'}, "kind='none'"),
        ({'pos_grid': 0}, r'pos_grid .* 1'),
        ({'kernel_size': 0}, r'kernel_size .* 1, not 0'),
        ({'patch_dropout': 1.0}, r'patch_dropout .* 0 .* 1'),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message) as error:
        Model(**TINY | fields)
    assert '\n' not in str(error.value)


def test_impossible_images_are_refused():
    model = Model(**TINY)
    with pytest.raises(UserError, match=r'height.*patch_size 4'):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 10, 8, 3)))
    sequences = Sequences(jnp.zeros((1, 4, 50)), jnp.ones((1, 2), int))
    with pytest.raises(UserError, match=r'\b50\b.*patch_size 4'):
        jax.eval_shape(model.init, jax.random.key(0), sequences)
    with pytest.raises(UserError, match='mixup and cutmix'):
        Task(mixup=0.2).augment(jax.random.key(0), {'patches': jnp.zeros((2, 4, 48))})
