"""Write features of images or texts to a file, and draw nearest neighbors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, run_options
from vit_jax.commands._parser import Parser, check_output, check_picture, save_figure, writing
from vit_jax.errors import EXIT_FAILED, UserError, positive_number

MAX_COLORED = 12  # most images in the picture of components
QUERIES, NEIGHBORS = 8, 5  # numbers of images in the picture of neighbors


def main(argv: Sequence[str]) -> int:
    """Compute features and write them; return EXIT_FAILED if an image was left out.

    Raises:
      UserError: A flag does not apply, or none of the images can be read.
    """
    args = parse(argv)
    size = image_size(args)
    from vit_jax.inference import embed, feature_files
    from vit_jax.inference.images import ImageInputs
    from vit_jax.runtime import compile_cache, console, mesh

    mesh.usable_devices()
    compile_cache.enable()
    trained = embed.open_for_features(args.model, size, **run_options(args))
    inputs: embed.Inputs
    if args.texts is None:
        inputs = ImageInputs.from_words(trained, args.inputs, args.split, size)
    else:
        inputs = embed.TextInputs(trained, read_texts(args.texts))
    kinds, layers = parse_features(args, trained)
    requested = embed.Wanted(kinds, layers, not args.unnormalized)
    left_out: dict[int, UserError] = {}
    written_count = None
    if args.out is not None:
        with writing(args.out, '--out'):
            embedder = embed.Embedder(trained, inputs, requested, args.batch_size)
            with console.progress(f'{inputs.column}s', len(inputs)) as advance:
                written_count = feature_files.write(embedder, args.out, advance)
        left_out |= written_count.left_out
        print(args.out)
    if args.pca is not None:
        left_out |= draw_components(trained, inputs, requested, args)
        print(args.pca)
    if args.neighbors is not None:
        left_out |= draw_neighbors(trained, inputs, requested, written_count, args)
        print(args.neighbors)
    for error in left_out.values():
        print(f'left out: {error}', file=sys.stderr)
    if left_out:
        count = f'{len(left_out)} of {len(inputs)} {inputs.column}s are left out'
        print(count, file=sys.stderr)
    return EXIT_FAILED if left_out else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, and check the outputs.

    Raises:
      UserError: A flag has a mistake.
    """
    parser = Parser('embed', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument(
        'inputs',
        nargs='*',
        metavar='IMAGES',
        help="files, folders, quoted patterns such as 'a/**/*.jpg', .tar files of WebDataset, or "
        "sources such as 'folder:PATH' or 'tfds:cifar10'",
    )
    parser.add_argument(
        '--texts',
        metavar='A;B|FILE',
        help='texts instead of images, or a .txt file with one text per line',
    )
    parser.add_argument('--out', metavar='FILE', help='file for the features: .parquet or .npz')
    parser.add_argument(
        '--features',
        metavar='KIND,...',
        help="kinds of features: embedding (the head's input, or the vector that CLIP and SigLIP "
        'compare), class (the class token), mean (of the patches), patches (default: embedding; '
        'with --layer, class or mean)',
    )
    parser.add_argument(
        '--layer',
        metavar='I,J|I..J',
        help='layers, such as 6,12 or -4..-1; 0 is the input of the first block (default: -1)',
    )
    parser.add_argument(
        '--unnormalized', action='store_true', help="leave out the model's final norm"
    )
    parser.add_argument(
        '--pca',
        metavar='FILE',
        help=f'picture of the principal components of patches, first {MAX_COLORED} images',
    )
    parser.add_argument(
        '--background', action='store_true', help='color the background in --pca too, not black'
    )
    parser.add_argument(
        '--neighbors',
        metavar='FILE',
        help=f'picture of the first {QUERIES} images, each with its {NEIGHBORS} nearest neighbors',
    )
    parser.add_argument('--split', default='train', help='split of sources (default: train)')
    parser.add_argument(
        '--batch-size',
        type=positive_number,
        default=32,
        metavar='N',
        help='images per batch, over all devices (default: 32)',
    )
    args = parser.parse_args(_attach_value(argv, '--layer'))
    check_model_flags(parser, args)
    _check(parser, args)
    return args


def _attach_value(argv: Sequence[str], flag: str) -> list[str]:
    """Attach the flag's value by an equals sign: argparse mistakes -4..-1 for a flag."""
    args = list(argv)
    for i in range(len(args) - 1, 0, -1):
        if args[i - 1] == flag and args[i][:1] == '-' and args[i][1:2].isdigit():
            args[i - 1 : i + 1] = [f'{flag}={args[i]}']
    return args


def _check(parser: Parser, args: argparse.Namespace) -> None:
    """Raise UserError if inputs are missing or an output cannot be written."""
    from vit_jax.inference import feature_files

    if bool(args.inputs) == (args.texts is not None):
        parser.error('give either images or --texts')
    pictures = {'--pca': args.pca, '--neighbors': args.neighbors}
    if args.out is None and not any(pictures.values()):
        parser.error('name an output: --out FILE, --pca FILE or --neighbors FILE')
    if args.background and args.pca is None:
        parser.error('--background applies to --pca: name a picture')
    if args.pca and args.neighbors and os.path.abspath(args.pca) == os.path.abspath(args.neighbors):
        parser.error('--pca and --neighbors name the same file')
    read = [*args.inputs, args.texts, args.model]
    if args.out is not None:
        if not args.out.lower().endswith(tuple(feature_files.WRITERS)):
            formats = ' or '.join(feature_files.WRITERS)
            raise UserError(f'--out {args.out!r}: the name must end in {formats}')
        check_output(args.out, '--out', read)
    for flag, picture in pictures.items():
        if picture is not None:
            check_picture(picture, flag, read)
            if args.texts is not None:
                raise UserError(f'{flag} draws images: name some instead of --texts')


def read_texts(source: str) -> list[str]:
    """Read the texts of `--texts`, separated by semicolons, or the lines of a .txt file.

    Raises:
      UserError: The file cannot be read, or a text is empty.
    """
    from vit_jax.storage import paths

    texts = [text.strip() for text in source.split(';')]
    if source.lower().endswith('.txt'):
        try:
            texts = paths.read_lines(paths.path(source), paths.TEXT)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'--texts {source}: {paths.reason(error)}') from error
    empty = next((i for i, text in enumerate(texts, 1) if not text.strip()), None)
    if not texts or empty:
        raise UserError(f'--texts {source!r}: {f"text {empty} is empty" if texts else "no text"}')
    return texts


def parse_features(
    args: argparse.Namespace, trained: Any
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Parse the kinds of features and the layers of the flags.

    Raises:
      UserError: The layers cannot be parsed.
    """
    from vit_jax.inference import embed

    layers = embed.LAST if args.layer is None else parse_layers(args.layer)
    if args.features is not None:
        return tuple(word.strip() for word in args.features.split(',')), layers
    if args.layer is None:
        return (embed.EMBEDDING,), layers
    return (embed.CLASS if getattr(trained.model, 'class_tokens', 0) else embed.MEAN,), layers


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse '6,12' as (6, 12), '-4..-1' as (-4, -3, -2, -1).

    Raises:
      UserError: The text is anything else.
    """
    layers: list[int] = []
    for word in text.split(','):
        match = re.fullmatch(r'(-?\d+)(?:\.\.(-?\d+))?', word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or (first < 0) != (last < 0):
            raise UserError(
                f'--layer {text!r}: write numbers such as 6,12, or a range such as -4..-1'
            )
        layers += range(first, last + 1)
    return tuple(dict.fromkeys(layers))


def draw_components(
    trained: Any, inputs: Any, wanted: Any, args: argparse.Namespace
) -> dict[int, UserError]:
    """Draw the picture of `--pca` from the last layer; return the images left out.

    Raises:
      UserError: None of the images can be read, or the patches do not form a grid.
    """
    from vit_jax.inference import embed
    from vit_jax.viz import features

    patches_only = embed.Wanted((embed.PATCHES,), wanted.layers[-1:], wanted.normalized)
    embedder = embed.Embedder(trained, inputs, patches_only, min(args.batch_size, MAX_COLORED))
    rows = embedder.rows(range(min(len(inputs), MAX_COLORED)))
    _require_rows(rows, 1, '--pca')
    (patches,) = rows.features.values()
    photos = [inputs.photo(i) for i in rows.numbers]
    grids = [features.grid_of(patches.shape[1], photo.image.shape) for photo in photos]
    figure = features.draw_components(photos, list(patches), grids, args.background)
    save_figure(figure, args.pca, '--pca')
    return rows.left_out


def draw_neighbors(
    trained: Any, inputs: Any, wanted: Any, written: Any, args: argparse.Namespace
) -> dict[int, UserError]:
    """Draw the picture of `--neighbors`; return the images left out.

    Args:
      trained, inputs, wanted: Model, inputs and features.
      written: Rows of the file of `--out`, whose features are read; None to compute them.
      args: Flags.

    Raises:
      UserError: There are fewer than two images, or the features are all of patches.
    """
    from vit_jax.inference import embed, feature_files
    from vit_jax.runtime import console
    from vit_jax.viz import features

    kind = next((kind for kind in wanted.kinds if kind != embed.PATCHES), None)
    if kind is None:
        raise UserError('--neighbors compares one vector of each image: add class to --features')
    if written is None:
        layers = wanted.layers[-1:] if kind != embed.EMBEDDING else embed.LAST
        vector_only = embed.Wanted((kind,), layers, wanted.normalized)
        embedder = embed.Embedder(trained, inputs, vector_only, args.batch_size)
        with console.progress('images', len(inputs)) as advance:
            written = embedder.rows(range(len(inputs)), advance)
        _require_rows(written, 2, '--neighbors')
        (vectors,) = written.features.values()
    else:
        _require_rows(written, 2, '--neighbors')
        vectors = feature_files.read_column(args.out, kind)
    queries = np.arange(min(QUERIES, len(vectors)))
    order, cosines = features.nearest_neighbors(vectors, queries, NEIGHBORS)
    rows = {*queries.tolist(), *order.ravel().tolist()}
    photos = {row: inputs.photo(written.numbers[row]) for row in rows}
    near = [[photos[row] for row in line] for line in order.tolist()]
    figure = features.draw_neighbors([photos[row] for row in queries.tolist()], near, cosines)
    save_figure(figure, args.neighbors, '--neighbors')
    return written.left_out


def _require_rows(rows: Any, least: int, flag: str) -> None:
    if len(rows.numbers) < least:
        problem = next(iter(rows.left_out.values()), 'only one is given')
        raise UserError(f'{flag} needs at least {least} readable images: {problem}')
