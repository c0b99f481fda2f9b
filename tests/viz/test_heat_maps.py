"""Rollout, heat maps and their pictures: what must hold for any attention weights."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.viz import attention, figures


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random_weights(rng, *shape):
    scores = np.exp(3 * rng.normal(size=shape))
    return scores / scores.sum(-1, keepdims=True)


def test_rows_of_a_rollout_sum_to_one(rng):
    result = attention.rollout(random_weights(rng, 5, 3, 7, 7))
    assert result.shape == (7, 7)
    assert (result >= 0).all()
    np.testing.assert_allclose(result.sum(-1), 1)


def test_identity_rolls_out_to_identity():
    weights = np.broadcast_to(np.eye(7), (5, 3, 7, 7))
    np.testing.assert_allclose(attention.rollout(weights), np.eye(7))


def test_one_layer_is_half_attention_and_half_residual(rng):
    weights = random_weights(rng, 1, 3, 7, 7)
    expected = 0.5 * weights[0].mean(axis=0) + 0.5 * np.eye(7)
    np.testing.assert_allclose(attention.rollout(weights), expected)


def test_later_layers_stand_on_the_left(rng):
    first, second = random_weights(rng, 2, 1, 7, 7)
    halves = [0.5 * w[0] + 0.5 * np.eye(7) for w in (first, second)]
    result = attention.rollout(np.stack([first, second]))
    np.testing.assert_allclose(result, halves[1] @ halves[0])
    assert not np.allclose(result, attention.rollout(np.stack([second, first])))


@pytest.mark.parametrize('grid', [(4, 4), (2, 5), (5, 2)])
@pytest.mark.parametrize('class_token', [0, 1])
def test_one_hot_attention_heats_one_patch(grid, class_token):
    patches = grid[0] * grid[1]
    for key in range(patches):
        weights = np.zeros((2, 3, patches + class_token, patches + class_token))
        weights[..., class_token + key] = 1
        heat = attention.heat_map(weights, grid, grid)
        assert heat.shape == (2, 3, *grid)
        expected = np.zeros(grid)
        expected[divmod(key, grid[1])] = 1
        np.testing.assert_array_equal(heat, np.broadcast_to(expected, heat.shape))


@pytest.mark.parametrize('class_token', [0, 1])
def test_the_query_chooses_the_row(rng, class_token):
    weights = random_weights(rng, 12 + class_token, 12 + class_token)
    heat = attention.heat_map(weights, (3, 4), (3, 4), query=(1, 2))
    np.testing.assert_array_equal(heat.ravel(), weights[class_token + 6, class_token:])
    by_default = attention.heat_map(weights, (3, 4), (3, 4)).ravel()
    expected = weights[0, 1:] if class_token else weights.mean(axis=0)
    np.testing.assert_allclose(by_default, expected)


@pytest.mark.parametrize('query', [(3, 0), (0, 4), (-1, 0), (5,)])
def test_a_query_outside_of_the_grid(query):
    with pytest.raises(UserError, match=r'3 rows.*4 columns'):
        attention.heat_map(np.eye(12), (3, 4), (3, 4), query)


def test_queries_and_keys_may_have_grids_of_their_own(rng):
    weights = random_weights(rng, 5, 2 + 12)  # five queries, two keys without a place
    heat = attention.heat_map(weights, (5,), (3, 4), query=(4,))
    np.testing.assert_array_equal(heat.ravel(), weights[4, 2:])
    by_default = attention.heat_map(weights, (5,), (3, 4))
    np.testing.assert_allclose(by_default.ravel(), weights.mean(axis=0)[2:])
    for wrong in ((5,), (1, 1)):
        with pytest.raises(UserError, match=r'outside.*5 queries'):
            attention.heat_map(weights, (5,), (3, 4), query=wrong)


def test_an_overlay_is_brightest_over_its_patch():
    image = np.full((60, 80, 3), 90, np.uint8)
    heat = np.zeros((3, 4))
    heat[2, 1] = 0.01
    picture = attention.overlay(image, heat).astype(int).sum(-1)
    assert picture.shape == (60, 80)
    row, column = np.unravel_index(picture.argmax(), picture.shape)
    assert 40 <= row < 60
    assert 20 <= column < 40
    assert picture.max() > 2 * np.median(picture)


@pytest.mark.parametrize('shade', [0, 255])
def test_the_image_shows_through_the_map_at_its_maximum(shade):
    image = np.full((8, 8, 3), shade, np.uint8)
    image[:, 4:] = 255 - shade
    picture = attention.overlay(image, np.ones((2, 2))).astype(int).sum(-1)
    assert abs(picture[:, :4].mean() - picture[:, 4:].mean()) > 50


@pytest.mark.parametrize('count', range(1, 25))
def test_few_places_of_a_section_stay_empty(count):
    columns = attention.choose_columns(count, 2)
    assert columns <= 8 and -count % columns <= columns / 2
    assert attention.choose_columns(count, 4) >= 4, 'smaller than three large ones'


def test_an_overlay_of_nothing_still_shows_the_image(rng):
    image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    picture = attention.overlay(image, np.zeros((2, 2)))
    correlation = np.corrcoef(picture.sum(-1).ravel(), image.astype(int).sum(-1).ravel())
    assert correlation[0, 1] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    ('layers', 'heads'), [(1, 2), pytest.param(12, 3, marks=pytest.mark.long), (14, 16)]
)
def test_a_picture_of_every_layer_and_head(rng, tmp_path, layers, heads):
    weights = random_weights(rng, layers, heads, 13, 13)
    image = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
    figure = attention.draw_layers(image, weights, (3, 4), (3, 4), query=(2, 3))
    titles = [axes.get_title() for axes in figure.axes]
    last = layers - 1
    assert titles == [
        'input',
        f'layer {last}, mean of heads',
        'rollout',
        *(f'layer {i}' for i in range(layers) if layers > 1),
        *(f'head {i}' for i in range(heads)),
        '',
    ]
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "attention / the map's maximum"
    (marker,) = figure.axes[0].patches
    assert marker.get_bbox().bounds == pytest.approx((29.5, 19.5, 10, 10))
    path = figures.save(figure, tmp_path / 'a.png', dpi=30)
    assert path.read_bytes().startswith(b'\x89PNG')


def test_the_heads_are_those_of_the_layer_asked_for(rng):
    image = np.zeros((16, 16, 3), np.uint8)
    weights = random_weights(rng, 3, 2, 4, 4)
    picture = lambda figure, i: figure.axes[i].images[0].get_array()  # noqa: E731
    first = attention.draw_layers(image, weights, (2, 2), (2, 2), layer=0)
    np.testing.assert_array_equal(picture(first, 1), picture(first, 3))
    expected = attention.overlay(image, attention.heat_map(weights[0, 1], (2, 2), (2, 2)))
    np.testing.assert_array_equal(picture(first, 7), expected)
    for wrong in (3, -4):
        with pytest.raises(UserError, match='layer'):
            attention.draw_layers(image, weights, (2, 2), (2, 2), layer=wrong)


def test_nearly_uniform_attention_is_called_flat():
    weights = np.full((2, 2, 4, 4), 0.25)
    weights[0, :, :, 0], weights[0, :, :, 1] = 0.23, 0.27
    weights[1, 1] = np.eye(4)
    figure = attention.draw_layers(
        np.zeros((8, 8, 3), np.uint8), weights, (2, 2), (2, 2), query=(0, 0)
    )
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    flat = {title.partition(' (')[0] for title in titles if 'flat' in title}
    assert flat == {'layer 0', 'head 0'}
    assert 'layer 0 (flat: ±8 %)' in titles


def test_queries_that_are_no_patches_have_no_rollout(rng, tmp_path):
    image, weights = np.zeros((16, 16, 3), np.uint8), random_weights(rng, 2, 2, 5, 4)
    figure = attention.draw_layers(image, weights, (5,), (2, 2), query=(3,))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ['input', 'layer 1, mean of heads', 'layer 0']
    assert not figure.axes[0].patches


@pytest.mark.parametrize(('head', 'words'), [(None, 'layer 1, mean of 2 heads'), (0, 'head 0')])
def test_a_picture_of_every_query(rng, head, words):
    image, weights = np.zeros((16, 24, 3), np.uint8), random_weights(rng, 2, 2, 5, 1 + 6)
    figure = attention.draw_queries(image, weights, (2, 3), head=head)
    assert [axes.get_title() for axes in figure.axes] == [
        'input',
        'mean of all queries',
        *(f'query {i}' for i in range(5)),
        '',  # the color bar
    ]
    assert words in figure.subfigs[1].get_suptitle()
    layer = weights[1].mean(axis=0) if head is None else weights[1, head]
    expected = attention.overlay(image, layer[3, 1:].reshape(2, 3))
    np.testing.assert_array_equal(figure.axes[5].images[0].get_array(), expected)


def test_heads_and_layers(rng):
    weights = random_weights(rng, 3, 2, 5, 4)
    mean, words = attention.layer_weights(weights)
    np.testing.assert_allclose(mean, weights[2].mean(0))
    assert words == 'layer 2, mean of 2 heads'
    one, words = attention.layer_weights(weights, layer=-3, head=1)
    np.testing.assert_array_equal(one, weights[0, 1])
    assert words == 'layer 0, head 1'
