"""Images next to their patches, colored by principal components of the features."""

import numpy as np

from vit_jax.viz import base, batch, figures


class Viz(base.Viz):
    """Prototypes as rows; patch colors are comparable across all images of a call."""

    bar = 'probability'

    def rows(self, prediction, photo, context):
        nearest = prediction['probs'].argsort()[:-4:-1].tolist()
        return [{'prototype': k, 'probability': float(prediction['probs'][k])} for k in nearest]

    def draw(self, predictions, photos, context):
        colors, pairs = principal(np.stack([each['patches'] for each in predictions])), []
        for photo, mine in zip(photos, colors, strict=True):
            image = figures.as_picture(photo.image, 160)
            side = round((image[..., 0].size / len(mine)) ** 0.5)
            grid = mine.reshape(image.shape[0] // side, -1, 3)
            pairs.append(np.stack([image, grid.repeat(side, 0).repeat(side, 1)]))
        return batch.draw_images(pairs, [photo.path.name for photo in photos])


def principal(x):
    """Colors [B N 3] of vectors [B N D] by their first three principal components."""
    rows = x.reshape(-1, x.shape[-1]) - x.mean((0, 1))
    colors = rows @ np.linalg.svd(rows, full_matrices=False)[2][:3].T
    colors = (colors - colors.min(0)) / np.ptp(colors, 0)
    return np.round(255 * colors).astype(np.uint8).reshape(*x.shape[:2], 3)
