"""What is shown of a classifier: its most probable classes."""

import argparse
import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.viz import classify, figures
from vit_jax.viz.photo import Context, Photo

PROBS = np.array([0.1, 0.5, 0.4])


def context(*class_names, top=2):
    return Context(class_names, argparse.Namespace(top=top))


def photo(height=8, width=12):
    image = np.random.default_rng(0).integers(0, 256, (height, width, 1), np.uint8)
    return Photo(pathlib.Path('a.png'), image, {'image': image}, '')


def test_classes_without_names():
    top = classify.Viz().rows({'probs': PROBS}, photo(), context('cat'))
    assert [(row['label'], row['class']) for row in top] == [(1, 'class 1'), (2, 'class 2')]
    assert (
        classify.Viz().rows({'probs': PROBS}, photo(), context('cat', top=5))[-1]['class'] == 'cat'
    )


@pytest.mark.parametrize(
    ('prediction', 'message'),
    [
        ({'features': PROBS}, 'model.*head'),
        ({'probs': PROBS[None]}, 'class.*patch'),
    ],
)
def test_no_classes_of_the_whole_image(prediction, message):
    with pytest.raises(UserError, match=message):
        classify.Viz().rows(prediction, photo(), context())


def test_the_picture_has_every_image_above_its_classes(tmp_path):
    photos = [photo(), photo(12, 8), photo(), photo(), photo()]
    predictions = [{'probs': np.roll(PROBS, i)} for i in range(5)]
    figure = classify.Viz().draw(predictions, photos, context('cat', 'dog', '$snake$'))
    images, bars = figure.axes[::2], figure.axes[1::2]
    assert len(images) == 5
    for i, (shown, axes) in enumerate(zip(images, bars, strict=True)):
        np.testing.assert_array_equal(
            shown.images[0].get_array(), figures.as_picture(photos[i].image)
        )
        assert [bar.get_width() for bar in axes.patches] == [0.5, 0.4]
        best = ['cat', 'dog', '$snake$'][(1 + i) % 3]
        assert axes.texts[0].get_text() == best
    assert figures.save(figure, tmp_path / 'a.png', dpi=30).read_bytes()[1:4] == b'PNG'
