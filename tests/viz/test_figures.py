"""What all figures share."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from vit_jax.viz import figures


def test_pictures_for_people():
    gray = np.random.default_rng(0).integers(0, 256, (4, 6, 1), np.uint8)
    picture = figures.as_picture(gray, side=10)
    assert picture.shape == (12, 18, 3)
    np.testing.assert_array_equal(picture[1::3, 1::3], gray.repeat(3, axis=2))
    floats = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 4, 3)
    picture = figures.as_picture(floats)
    assert (picture.dtype, picture.min(), picture.max()) == (np.uint8, 0, 255)
    assert (np.diff(picture.ravel().astype(int)) > 0).all()


@pytest.mark.parametrize(('channels', 'shown'), [(2, [0, 0, 0]), (4, [0, 1, 2]), (12, [0, 1, 2])])
def test_pictures_of_other_channels_show_the_first(channels, shown):
    image = np.random.default_rng(0).integers(0, 256, (4, 6, channels), np.uint8)
    np.testing.assert_array_equal(figures.as_picture(image), image[..., shown])


def test_names_are_no_tex_but_formulas_are(tmp_path):
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], label='_$x_{$')
    axes.plot([1, 2], label='cost $5 or $6')
    axes.plot([1, 2])
    axes.set_title('\x1b[31m$\\nosuch$')
    axes.set_xticks([0, 1], ['$^$', 'b'])
    figures.legend(axes)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ['_$x_{$', 'cost $5 or $6']
    formula = axes.set_ylabel('$x^{2}$')
    figures.set_formula(formula)
    figures.save(figure, tmp_path / 'a.svg')
    assert axes.get_title() == '\\u001b[31m$\\nosuch$'
    svg = (tmp_path / 'a.svg').read_text()
    for text in (*labels, '$^$', axes.get_title()):
        assert f'<!-- {text} -->' in svg
    assert '<!-- $x^{2}$ -->' in svg
    assert formula.get_parse_math()
