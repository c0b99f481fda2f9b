"""Write a model as a program that needs only JAX: StableHLO for CPUs, GPUs and TPUs."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from vit_jax.commands._model import add_checkpoint_flags, add_image_size_flag, image_size
from vit_jax.commands._parser import Parser, check_output


def main(argv: Sequence[str]) -> int:
    """Write the folder, and print its contents.

    Raises:
      UserError: if the model has no predictions for images, or the folder exists.
    """
    parser = Parser('export', __doc__)
    parser.add_argument(
        'src',
        metavar='CHECKPOINT',
        help='a run folder, RUN/checkpoints/STEP, or weights of another code base: a file, a '
        'folder, or a URL such as hf://google/vit-base-patch16-224',
    )
    parser.add_argument('dst', metavar='FOLDER', help='to write; it must not exist')
    add_checkpoint_flags(parser)
    add_image_size_flag(parser)
    parser.add_argument(
        '--int8', action='store_true', help='store kernels as int8, a quarter of their size'
    )
    args = parser.parse_args(argv)
    check_output(pathlib.Path(args.dst) / 'model.json', 'dst')
    size = image_size(args)
    from vit_jax.inference import export

    about = export.export(
        *(args.src, args.dst, size),
        int8=args.int8,
        step=args.step,
        average=args.average,
        allowed=args.allow,
    )
    for kind in ('inputs', 'outputs'):
        for name, (shape, dtype) in about[kind].items():
            print(f'{kind[:-1]} {name}: {dtype} [{", ".join(map(str, shape))}]')
    print(f'{args.dst}: written for {", ".join(about["platforms"])}')
    return 0
