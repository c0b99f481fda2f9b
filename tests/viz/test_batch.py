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
