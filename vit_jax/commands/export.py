"""Write a model as a program (StableHLO) that runs on CPUs, GPUs and TPUs without this package."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, run_options
from vit_jax.commands._parser import Parser, check_output


def main(argv: Sequence[str]) -> int:
    """Write the folder, and print its contents.

    Raises:
      UserError: The model does not predict for images, or the folder exists.
    """
    parser = Parser('export', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument('out', metavar='OUT', help='folder to write, which must not exist')
    parser.add_argument(
        '--int8', action='store_true', help='store kernels as int8, a quarter of their size'
    )
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    check_output(pathlib.Path(args.out) / 'model.json', 'OUT')
    size = image_size(args)
    from vit_jax.inference import export

    about = export.export(args.model, args.out, size, int8=args.int8, **run_options(args))
    for kind in ('inputs', 'outputs'):
        for name, (shape, dtype) in about[kind].items():
            print(f'{kind[:-1]} {name}: {dtype} [{", ".join(map(str, shape))}]')
    print(f'{args.out}: written for {", ".join(about["platforms"])}')
    return 0
