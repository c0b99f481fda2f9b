"""Pictures of parameters: one scale for each, white at zero."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.maps import ParameterPictures
from vit_jax.viz import attention_pictures

BIAS = ParameterPictures('a/bias', np.linspace(-2, 1, 3 * 25).reshape(3, 5, 5), 'head')
FILTERS = ParameterPictures(
    'filters', np.random.default_rng(0).normal(size=(6, 4, 4, 3)), 'filter', columns=2
)


def test_every_picture_is_drawn_on_the_scale_of_its_parameter():
    figure = attention_pictures.draw_parameters([BIAS, FILTERS], title='a model')
    assert [axes.get_title() for axes in figure.axes] == ['head 0', 'head 1', 'head 2', *[''] * 6]
    for axes, picture in zip(figure.axes[:3], BIAS.pictures, strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), picture)
        assert image.get_clim() == (-2, 2)
    assert figure.axes[3].images[0].get_array().shape == (4, 4, 3)
    # Six filters in two columns are three rows.
    tops = {round(axes.get_subplotspec().rowspan.start) for axes in figure.axes[3:]}
    assert tops == {0, 1, 2}


def test_one_picture_keeps_its_number():
    figure = attention_pictures.draw_parameters([BIAS], index=2)
    assert [axes.get_title() for axes in figure.axes] == ['head 2']
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), BIAS.pictures[2])
    with pytest.raises(UserError, match='3: a/bias has 3, 0 to 2'):
        attention_pictures.draw_parameters([BIAS], index=3)
