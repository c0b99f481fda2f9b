"""Write a model as a program (StableHLO or ONNX) that runs without this package."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, run_options
from vit_jax.commands._parser import Parser, check_output
from vit_jax.errors import UserError


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
    parser.add_argument(
        '--format',
        choices=('stablehlo', 'onnx'),
        default='stablehlo',
        help='form of the program: stablehlo, for CPUs, GPUs and TPUs (default), or onnx',
    )
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    check_output(pathlib.Path(args.out) / 'model.json', 'OUT')
    size = image_size(args)
    if args.format == 'onnx':
        return _write_onnx(args, size)
    from vit_jax.inference import export

    about = export.export(args.model, args.out, size, int8=args.int8, **run_options(args))
    for kind in ('inputs', 'outputs'):
        for name, (shape, dtype) in about[kind].items():
            print(f'{kind[:-1]} {name}: {dtype} [{", ".join(map(str, shape))}]')
    print(f'{args.out}: written for {", ".join(about["platforms"])}')
    return 0


def _write_onnx(args: argparse.Namespace, size: tuple[int, int] | None) -> int:
    if args.int8:
        raise UserError('--int8 is for StableHLO: quantize the ONNX file with onnxruntime')
    from vit_jax.inference import onnx_program

    about = onnx_program.export_onnx(args.model, args.out, size, **run_options(args))
    print(f'outputs: {", ".join(about["outputs"])}')
    print(
        f'{args.out}: {onnx_program.PROGRAM} differs from JAX by at most '
        f'{about["largest_difference"]:.0e} of the largest output'
    )
    return 0
