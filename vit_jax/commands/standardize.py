"""Write statistics that standardize a teacher's patches (PHI-S) for the task `agglomerate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, run_options
from vit_jax.commands._parser import Parser, check_output, writing
from vit_jax.errors import EXIT_FAILED, UserError, positive_number

if TYPE_CHECKING:
    import numpy as np

    from vit_jax.inference.embed import Embedder


def main(argv: Sequence[str]) -> int:
    """Estimate the statistics and write them; return EXIT_FAILED if an image was left out.

    Raises:
      UserError: A flag does not apply, the model has no patches, or no image can be read.
    """
    parser = Parser('standardize', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='IMAGES',
        help='training images: files, folders, patterns or sources, see the command embed',
    )
    parser.add_argument('--out', metavar='FILE', required=True, help='.npz file of the statistics')
    parser.add_argument(
        '--split', default='train', help="split of sources, such as 'train[:1000]' (default: train)"
    )
    parser.add_argument(
        '--batch-size',
        type=positive_number,
        default=32,
        metavar='N',
        help='images per batch, over all devices (default: 32)',
    )
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    if not args.out.lower().endswith('.npz'):
        raise UserError(f'--out {args.out!r}: the name must end in .npz')
    check_output(args.out, '--out', [*args.inputs, args.model])
    size = image_size(args)
    from vit_jax.inference import embed
    from vit_jax.inference.images import ImageInputs
    from vit_jax.interop import files
    from vit_jax.runtime import compile_cache, console, mesh

    mesh.usable_devices()
    compile_cache.enable()
    trained = embed.open_for_features(args.model, size, **run_options(args))
    inputs = ImageInputs.from_words(trained, args.inputs, args.split, size)
    embedder = embed.Embedder(trained, inputs, embed.Wanted((embed.PATCHES,)), args.batch_size)
    with console.progress('images', len(inputs)) as advance:
        arrays, left_out = estimate(embedder, advance)
    with writing(args.out, '--out'):
        files.write_npz(args.out, arrays)
    print(args.out)
    for error in left_out.values():
        print(f'left out: {error}', file=sys.stderr)
    return EXIT_FAILED if left_out else 0


def estimate(
    embedder: Embedder, advance: Callable[[int], object]
) -> tuple[dict[str, np.ndarray], dict[int, UserError]]:
    """Compute the statistics of PHI-S over the patches of all inputs.

    Args:
      embedder: Model and images, which computes only patches.
      advance: Called after each batch with the number of its images.

    Returns:
      The arrays of a file of statistics, and the errors of the images left out.

    Raises:
      UserError: if no image can be read, or the patches do not vary.
    """
    from vit_jax.ops import phi_s

    moments = phi_s.Moments()
    left_out: dict[int, UserError] = {}
    for start in range(0, len(embedder.inputs), embedder.batch_size):
        stop = min(start + embedder.batch_size, len(embedder.inputs))
        rows = embedder.rows(range(start, stop), advance)
        left_out |= rows.left_out
        for patches in rows.features.values():
            moments.add(patches)
    if not moments.count:
        raise next(iter(left_out.values()))
    return phi_s.standardization(moments), left_out
