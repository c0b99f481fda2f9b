"""ColTran core: who sees whom, sampling with a cache, parameter counts, attention maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says

from vit_jax.errors import UserError
from vit_jax.models.coltran import Model
from vit_jax.ops import search
from vit_jax.ops.colors import NUM_COARSE_BINS

TINY = {'width': 16, 'num_heads': 2, 'mlp_dim': 24}
TINY |= {'encoder_depth': 1, 'outer_depth': 2, 'inner_depth': 1}
BATCH, HEIGHT, WIDTH = 2, 4, 5
RNG = np.random.default_rng(0)
GRAY = jnp.asarray(RNG.integers(0, 256, (BATCH, HEIGHT, WIDTH)), jnp.uint8)
BINS_DRAWN = jnp.asarray(RNG.integers(0, NUM_COARSE_BINS, (BATCH, HEIGHT, WIDTH)), jnp.int32)


@pytest.fixture(scope='module')
def model():
    return Model(**TINY)


@pytest.fixture(scope='module')
def variables(model):
    """Drawn, so that nothing is zero or one."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), GRAY, BINS_DRAWN)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), s.dtype), shapes)


@pytest.fixture(scope='module')
def apply(model, variables):
    """The outputs for colors of a gray image, and what the layers have kept."""
    run = jax.jit(functools.partial(model.apply, mutable=['intermediates']))
    return lambda bins, gray=GRAY: run(variables, gray, bins)


@pytest.fixture(scope='module')
def outputs(apply):
    return apply(BINS_DRAWN)[0]


@pytest.mark.slow
def test_no_pixel_sees_a_later_one(apply, outputs):
    """The scores of a pixel change with the colors before it, and with the whole gray image."""
    expected, pixels = np.asarray(outputs['logits']), HEIGHT * WIDTH
    for pixel, place in enumerate(np.ndindex(HEIGHT, WIDTH)):
        there = np.zeros((HEIGHT, WIDTH), bool)
        there[place] = True
        bins = np.where(there, (BINS_DRAWN + NUM_COARSE_BINS // 2) % NUM_COARSE_BINS, BINS_DRAWN)
        gray = np.where(there, GRAY + 128, GRAY)  # modulo 256
        of_colors, of_gray = (
            (np.asarray(apply(*x)[0]['logits']) != expected).any(-1).reshape(BATCH, pixels)
            for x in ((bins,), (BINS_DRAWN, gray))
        )
        assert not of_colors[:, : pixel + 1].any()
        assert of_colors[:, pixel + 1 :].all()
        assert of_gray.all()


@pytest.mark.slow
def test_the_parallel_head_sees_the_gray_image_alone(apply, outputs):
    other, _ = apply((BINS_DRAWN + 7) % NUM_COARSE_BINS)
    np.testing.assert_array_equal(other['parallel_logits'], outputs['parallel_logits'])
    assert np.abs(other['logits'] - outputs['logits']).max() > 0.1


@pytest.mark.slow
def test_the_cache_gives_what_teacher_forcing_gives(model, variables, outputs):
    def step(cache, colors_and_position):
        logits, cache = model.apply(variables, cache, *colors_and_position, method='decode_step')
        return cache, logits

    @jax.jit
    def decode():
        drawn = BINS_DRAWN.reshape(BATCH, -1)
        before = jnp.roll(drawn, 1, axis=1).T  # of the first pixel any will do
        cache = model.apply(variables, GRAY, method='start')
        return jax.lax.scan(step, cache, (before, jnp.arange(HEIGHT * WIDTH)))[1]

    logits = decode().swapaxes(0, 1).reshape(BATCH, HEIGHT, WIDTH, NUM_COARSE_BINS)
    np.testing.assert_allclose(logits, outputs['logits'], atol=1e-5)


@pytest.mark.slow
def test_what_is_sampled_at_low_temperature_is_the_most_probable(model, variables, apply):
    step = functools.partial(model.apply, variables, method='decode_step')

    @jax.jit
    def draw(seed):
        cache = model.apply(variables, GRAY, method='start')
        keys = jax.random.split(jax.random.key(seed), BATCH)
        found = search.sample(
            step, cache, keys, max_len=HEIGHT * WIDTH, temperature=1e-4, bos=0, eos=-1
        )
        return found.tokens[:, 0].reshape(GRAY.shape)

    drawn = draw(0)
    logits = apply(drawn)[0]['logits']
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


@pytest.mark.slow
def test_attention_is_laid_back_onto_the_image(model, apply):
    _, kept = apply(BINS_DRAWN)
    maps = model.attention_maps(kept['intermediates'], GRAY, BINS_DRAWN)
    pairs = ('encoder/row_0', 'encoder/column_0', 'outer/row_0', 'outer/column_0')
    assert [m.name for m in maps] == [*pairs, 'outer/row_1', 'outer/column_1', 'inner/row_0']
    row, column = np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)
    for found in maps:
        weights = np.asarray(found.weights)
        assert weights.shape == (BATCH, 2, HEIGHT * WIDTH, HEIGHT * WIDTH)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        line = row if '/row' in found.name else column
        assert (weights[..., line[:, None] != line] == 0).all()
    below = row[:, None] < row
    assert (np.asarray(maps[3].weights)[..., below] == 0).all()


@pytest.mark.slow
def test_parameter_count_is_exact():
    """Of the published size, counted by hand."""
    model = Model()
    gray, bins = (jax.ShapeDtypeStruct((1, 64, 64), dtype) for dtype in (jnp.uint8, jnp.int32))
    shapes = jax.eval_shape(model.init, jax.random.key(0), gray, bins)['params']
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    d, side = 512, 64
    attention = 4 * (d * d + d) + 4 * (2 * side - 1)
    mlp = 2 * (d * d + d)
    plain = attention + mlp + 2 * 2 * d
    positions = 2 * side * d

    def conditional(context):
        affine = 2 * d * context + 2 * d
        norms = 2 * (2 * d * d + 2 * d + side * side)
        return attention + mlp + 4 * affine + norms

    encoder = 256 * d + positions + 8 * plain + d * 512
    decoder = 512 * d + 2 * positions + 4 * conditional(d) + 2 * conditional(2 * d)
    assert count == encoder + decoder + 2 * d + d * 512 + 512


@pytest.mark.slow
@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
def test_what_is_learned_of_places_is_resized_with_the_image(model, variables, method):
    params = variables['params']
    resized, notes = model.resize_params(params, None, (7, 9), method)
    assert says(notes, 'columns, relative_bias, rows, weights', '9 x 7', method)
    gray, bins = (jax.ShapeDtypeStruct((1, 7, 9), dtype) for dtype in (jnp.uint8, jnp.int32))
    fresh = jax.eval_shape(model.init, jax.random.key(0), gray, bins)['params']
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    for layer, places in (('columns_0', (HEIGHT, 7)), ('rows_0', (WIDTH, 9))):
        old, new = (
            tree['outer'][layer]['attention']['relative_bias'] for tree in (params, resized)
        )
        middles = [bias[:, count - 1] for bias, count in zip((old, new), places, strict=True)]
        np.testing.assert_allclose(*middles, rtol=1e-6)  # of a place at itself
    assert model.resize_params(params, None, (HEIGHT, WIDTH), method) == (params, [])


def test_mistakes(model, variables):
    with pytest.raises(UserError, match=r'width 16.*num_heads 3'):
        Model(**TINY | {'num_heads': 3})
    with pytest.raises(UserError, match=r'5 x 4.*4 x 4'):
        jax.eval_shape(model.apply, variables, GRAY[:, :, :4], BINS_DRAWN[:, :, :4])
