"""Colorize photographs with a run of coltran, and refine the samples with upsamplers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.commands._model import add_run_flags, run_options
from vit_jax.commands._parser import (
    Parser,
    add_json_flag,
    check_image_names,
    check_picture,
    image_names,
    is_folder,
    save_figure,
    save_images,
)
from vit_jax.viz.sampling_flags import add_sampling_flags


def main(argv: Sequence[str]) -> int:
    """Print a line per sample, or JSON; draw the samples with `--out`."""
    args = parse_args(argv)
    from vit_jax.inference.colorize import ColorizedPhoto, check_task, colorizer
    from vit_jax.inference.load import open_run
    from vit_jax.runtime import compile_cache, mesh
    from vit_jax.viz import batch, coltran
    from vit_jax.viz.photo import Context

    folder = args.out is not None and is_folder(args.out)
    if args.out is not None and not folder:
        check_picture(args.out, '--out', args.image)
    mesh.usable_devices()
    core = open_run(args.workdir, **run_options(args))
    check_task(core, 'coltran', 'RUN')
    core = core.adapted(task=coltran.Viz().adapt_task(core.task, Context(flags=args)))
    names = image_names(args.image, core.task.samples)
    if folder:
        check_image_names(names, args.image, args.out, '--out')
    upsamplers = [open_run(path, allowed=args.allow) for path in args.upsampler]
    compile_cache.enable()
    colorize = colorizer(core, upsamplers, args.seed)
    results = [colorize(path) for path in args.image]

    def make_rows(result: ColorizedPhoto) -> list[dict[str, Any]]:
        return coltran.sample_rows(result.samples, result.bits_per_dim, result.photo)

    if folder:
        save_images(yield_samples(results, args.as_seen), names, args.out, '--out')
    elif args.out is not None:
        panel = coltran.sample_panels if args.as_seen else coltran.file_panels
        panels = [panel(result.photo, result.samples) for result in results]
        figure = batch.draw_rows(panels, [result.photo.path.name for result in results])
        save_figure(figure, args.out, '--out')
    if args.json:
        records = [{'image': str(r.photo.path), 'samples': make_rows(r)} for r in results]
        print(json.dumps(records))
        return 0
    for result in results:
        print(f'{result.photo.path}  {result.photo.note}')
        for row in make_rows(result):
            psnr = '' if row['psnr'] is None else f'  PSNR {row["psnr"]:.2f} dB'
            print(f'  sample {row["sample"]}  {row["bits_per_dim"]:.4f} bits per pixel{psnr}')
    if args.out is not None:
        print(args.out)
    return 0


def yield_samples(results: Sequence[Any], as_seen: bool) -> Iterator[Any]:
    """Yield every sample of every photograph: on the file's luminance, or as the model made it."""
    from vit_jax.viz import coltran

    for result in results:
        for sample in result.samples:
            yield sample if as_seen else coltran.color_file(result.photo, sample)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags."""
    parser = Parser('colorize', __doc__)
    add_run_flags(parser, argv)
    parser.add_argument(
        '--upsampler',
        action='append',
        default=[],
        metavar='DIR',
        help='run folder of an upsampler; may be repeated, for a chain in this order',
    )
    add_sampling_flags(parser)
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='picture to write (PNG, SVG, PDF or JPEG); or a folder for every sample at full '
        'size: NAME_0.png, NAME_1.png, ...',
    )
    parser.add_argument(
        '--as-seen',
        action='store_true',
        help="show the model's images at their own size, not their colors on the file",
    )
    add_json_flag(parser)
    parser.add_argument(
        '--seed', type=int, default=0, help='random seed of the samples (default: 0)'
    )
    parser.add_argument('image', nargs='+', help='JPEG, PNG or WebP files, gray or in color')
    return parser.parse_args(argv)
