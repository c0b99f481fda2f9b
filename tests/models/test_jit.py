"""JiT: exact parameter counts, numbers of the authors' code, and what conditions the image."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jit_numbers
from helpers.jit_numbers import MODEL
from helpers.pictures import count

from vit_jax.errors import UserError
from vit_jax.models.jit import Model, in_the_middle, variant
from vit_jax.viz.attention_pictures import choose_stack, stack_weights

# Of LTH14/JiT for 1,000 classes, without its table of fixed positions.
COUNTS = {
    'B/16': 131_123_712,
    'B/32': 133_190_400,
    'L/16': 458_877_664,
    'L/32': 461_534_176,
    'H/16': 952_514_368,
    'H/32': 956_055_616,
}


@pytest.mark.parametrize(
    'name', [n if n.startswith('B') else pytest.param(n, marks=pytest.mark.long) for n in COUNTS]
)
def test_parameter_counts_are_exact(name):
    model, side = Model(num_classes=1000, **variant(name)), 256
    inputs = (jnp.zeros((1, side, side, 3)), jnp.zeros(1), jnp.zeros(1, jnp.int32))
    assert count(jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs))) == COUNTS[name]


@functools.cache
def _compiled(model=MODEL):
    return jax.jit(model.apply, static_argnames='mutable')


def predict(params=None, model=MODEL, **changes):
    inputs = jit_numbers.batch() | changes
    params = jit_numbers.params() if params is None else params
    variables = {'params': params}
    return _compiled(model)(variables, *(inputs[name] for name in ('image', 'time', 'label')))[
        'image'
    ]


def test_outputs_are_those_of_the_authors_code():
    """Of king398/DiffusionFusion (JiT/model_jit.py), a copy of LTH14/JiT, with these parameters."""
    found = predict()
    expected = [
        *(0.834033, 0.117434, 1.044696, 0.348332, -0.547899, 0.96823),
        *(-0.353036, -0.491896, 1.193668, 0.148449, -0.669931, 0.684984),
    ]
    np.testing.assert_allclose(found.reshape(-1)[::64], expected, atol=1e-5)
    assert float(jnp.square(found).mean()) == pytest.approx(0.5420899, rel=1e-5)


@pytest.mark.slow
def test_a_new_model_predicts_zeros_of_every_image():
    inputs = jit_numbers.batch()
    arrays = tuple(inputs[name] for name in ('image', 'time', 'label'))
    variables = jax.jit(MODEL.init)(jax.random.key(0), *arrays)
    assert not predict(variables['params']).any()


def test_time_and_class_change_the_prediction_of_their_own_row():
    before = predict()
    for change in ({'time': jnp.array([0.1, 0.4, 0.8, 0.98])}, {'label': jnp.array([3, 0, 2, 4])}):
        moved = np.abs(predict(**change) - before).max((1, 2, 3))
        assert moved[2] > 1e-3
        assert not moved[[0, 1, 3]].any()


def test_without_classes_there_is_one_embedding():
    model = MODEL.clone(num_classes=None)
    params = jit_numbers.params()
    none = params | {'class_embed': params['class_embed'][-1:]}
    labels = jnp.full(4, -1)
    np.testing.assert_allclose(predict(none, model, label=labels), predict(label=labels), atol=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_recomputation_changes_no_gradient():
    inputs = jit_numbers.batch()
    arrays = tuple(inputs[name] for name in ('image', 'time', 'label'))

    def gradient(model):
        loss = lambda p: jnp.square(model.apply({'params': p}, *arrays)['image']).mean()  # noqa: E731
        return jax.jit(jax.grad(loss))(jit_numbers.params())

    kept, recomputed = gradient(MODEL), gradient(MODEL.clone(remat='names'))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), kept, recomputed)


def test_all_blocks_have_maps_of_patches_and_those_with_context_its_tokens():
    inputs = jit_numbers.batch()
    arrays = tuple(inputs[name] for name in ('image', 'time', 'label'))
    variables = {'params': jit_numbers.params()}
    _, sown = _compiled()(variables, *arrays, mutable=('intermediates',))
    maps = MODEL.attention_maps(sown['intermediates'], *arrays)
    context, patches = (
        stack_weights(choose_stack(maps, 'context')),
        stack_weights(choose_stack(maps)),
    )
    assert context.shape == (2, 2, 3, 19) and patches.shape == (3, 2, 16, 16)
    for weights in (context, patches):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    kept = np.asarray(sown['intermediates']['block_2']['attention']['attention'][0][0])
    np.testing.assert_array_equal(context[1], kept[:, :3])
    assert np.ptp(patches[2] / kept[:, 3:, 3:], axis=-1).max() < 1e-5  # each row by one factor


def test_dropout_acts_in_the_middle_half_of_the_blocks():
    found = [[i for i in range(depth) if in_the_middle(i, depth)] for depth in (12, 9, 3)]
    assert found == [[3, 4, 5, 6, 7, 8], [2, 3, 4, 5], []]


def test_mistakes():
    with pytest.raises(UserError, match='the start below depth=3'):
        MODEL.clone(context_start=3)
    with pytest.raises(UserError, match="unknown JiT variant 'S'"):
        variant('S/16')
    with pytest.raises(UserError, match='B/16'):
        variant('B')
