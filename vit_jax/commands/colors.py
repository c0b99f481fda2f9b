"""Count the colors of images, so that colorization can give rare ones more weight."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.commands._parser import Parser, check_output, writing
from vit_jax.errors import UserError, positive_number

PIXELS = 1024  # most pixels counted per image


def main(argv: Sequence[str]) -> int:
    """Write the file for `config.task.prior`, and print the most frequent colors."""
    parser = Parser('colors', __doc__)
    parser.add_argument('source', help="source of images, such as 'tfds:cifar10' or 'folder:PATH'")
    parser.add_argument(
        '--split',
        default='train',
        help="split of the source, such as 'train[:90%%]' (default: train)",
    )
    parser.add_argument(
        '--images', type=positive_number, help='number of images to count (default: all)'
    )
    parser.add_argument(
        '--out', required=True, metavar='FILE', help='file to write, for config.task.prior'
    )
    args = parser.parse_args(argv)
    out = pathlib.Path(args.out).expanduser()
    check_output(out, '--out', [args.source])
    from vit_jax.data import sources
    from vit_jax.ops import colors
    from vit_jax.tasks import colorize

    source = sources.open_source(args.source, args.split)
    stride = max(1, len(source) // (args.images or len(source)))
    counts = count_colors(source, range(0, len(source), stride)[: args.images])
    with writing(out, '--out'):
        colorize.write_color_counts(out, counts, source.title)
    used = np.argsort(-counts, kind='stable')[:3]
    top = ', '.join(f'{tuple(colors.bin_centers()[i].astype(int).tolist())}' for i in used)
    print(
        f'{out}: {counts.sum():,} pixels in {np.count_nonzero(counts)} of {len(counts)} bins; '
        f'the fullest are around (a, b) = {top}'
    )
    return 0


def count_colors(source: Any, indices: range) -> np.ndarray:
    """Count the pixels in each bin, int64 [Q], of at most `PIXELS` random pixels per image.

    Raises:
      UserError: An image does not have three channels.
    """
    import jax
    import jax.numpy as jnp

    from vit_jax.data.records import BrokenRecord
    from vit_jax.ops import colors

    @jax.jit
    def count(rgb: jax.Array) -> jax.Array:
        bins = colors.nearest_bin(colors.rgb_to_lab(rgb / 255)[..., 1:])
        return jnp.bincount(bins, length=colors.NUM_BINS)

    total = np.zeros(colors.NUM_BINS, np.int64)
    rng = np.random.default_rng(0)
    for index in indices:
        try:
            image = source[index]['image']
        except BrokenRecord:
            continue
        if image.shape[-1] != 3:
            raise UserError(
                f'{source.record_name(index)}: has {image.shape[-1]} channels, not the 3 of RGB'
            )
        pixels = image.reshape(-1, 3)
        if len(pixels) > PIXELS:
            pixels = pixels[rng.choice(len(pixels), PIXELS, replace=False)]
        total += np.asarray(count(pixels))
    return total
