"""Images as sequences of patches."""

import numpy as np

from vit_jax.data.transforms import transform


@transform
def patches(side):
    """Cut the image into `patches` [n, side * side * C], with `positions` [n, 2]."""

    def apply(record):
        height, width, channels = record['image'].shape
        rows, columns = height // side, width // side
        image = record['image'][: rows * side, : columns * side]
        cut = image.reshape(rows, side, columns, side, channels).swapaxes(1, 2)
        rest = {name: value for name, value in record.items() if name != 'image'}
        positions = np.stack(np.mgrid[:rows, :columns], -1).reshape(-1, 2)
        return rest | {'patches': cut.reshape(rows * columns, -1), 'positions': positions}

    return apply
