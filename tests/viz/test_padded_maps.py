"""Heat maps of padded images, and of the queries that matter."""

import numpy as np
import pytest

from vit_jax.viz import attention

IMAGE = np.full((40, 60, 3), 128, np.uint8)


def pictures(figure):
    """{title: picture} of everything that is drawn."""
    parts = figure.subfigs
    return {
        axes.get_title(): axes.images[0].get_array()
        for part in parts
        for axes in part.axes
        if axes.images
    }


def weights(layers, heads, queries, keys):
    w = np.random.default_rng(0).random((layers, heads, queries, keys))
    return w / w.sum(-1, keepdims=True)


def test_queries_are_drawn_by_name_without_the_padding():
    drawn = pictures(
        attention.draw_queries(
            IMAGE, weights(2, 2, 5, 6), (2, 3), names={1: 'dog', 4: ''}, real_size=(30, 44)
        )
    )
    assert list(drawn) == ['input', 'mean of all queries', 'query 1: dog', 'query 4']
    assert {picture.shape for picture in drawn.values()} == {(30, 44, 3)}


def test_what_is_left_is_the_corner_of_the_whole_picture():
    w = weights(2, 2, 6, 6)
    whole, cut = (
        pictures(attention.draw_layers(IMAGE, w, (2, 3), (2, 3), query=(0, 1), real_size=seen))
        for seen in (None, (30, 44))
    )
    assert whole.keys() == cut.keys()
    for name, picture in cut.items():
        np.testing.assert_array_equal(picture, whole[name][:30, :44])


@pytest.mark.parametrize('names', [None, {}])
def test_all_queries_or_none(names):
    drawn = pictures(attention.draw_queries(IMAGE, weights(1, 2, 5, 6), (2, 3), names=names))
    assert len(drawn) == 2 + (5 if names is None else 0)


@pytest.mark.slow
def test_small_pictures_of_a_large_image_have_no_pixels_that_nobody_sees():
    image = np.zeros((1400, 2100, 3), np.uint8)
    drawn = pictures(
        attention.draw_queries(image, weights(1, 2, 5, 6), (2, 3), real_size=(700, 1050))
    )
    assert drawn['input'].shape == drawn['mean of all queries'].shape == (700, 1050, 3)
    assert {drawn[f'query {i}'].shape for i in range(5)} == {(140, 210, 3)}
