"""Examples beside one another."""

import numpy as np

from vit_jax.viz import batch


def test_views_and_frames_are_shown_side_by_side():
    views = np.stack([np.full((4, 5, 3), shade, np.uint8) for shade in (0, 100, 200)])
    figure = batch.draw_images([views, views[0]], ['three', 'one'])
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:2]]
    columns = [shown.shape[1] / shown.shape[0] for shown in drawn]
    assert columns == [15 / 4, 5 / 4]
    assert len(np.unique(drawn[0])) == 3


def test_a_few_images_fill_the_picture():
    image = np.zeros((4, 4, 3), np.uint8)
    for count, shape in ((1, (1, 1)), (9, (2, 5)), (20, (3, 7)), (32, (4, 8))):
        figure = batch.draw_images([image] * count, [''] * count)
        assert figure.axes[0].get_gridspec().get_geometry() == shape


def test_rows_of_pictures_carry_the_names_of_files():
    image = np.zeros((4, 6, 3), np.uint8)
    rows = [[('gray', image), ('colored', image)], [('gray', image)]]
    figure = batch.draw_rows(rows, ['a.png', 'b.png'])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ['a.png: gray', 'colored', 'b.png: gray', '']
