"""Predict for image files and folders with a trained model."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._box_files import (
    FOLDERS,
    FORMATS,
    box_files,
    check_format_flag,
    write_boxes,
    write_names,
)
from vit_jax.commands._model import (
    MODEL_FLAGS,
    add_model_flags,
    check_model_flags,
    image_size,
    open_model,
    task_name,
)
from vit_jax.commands._parser import (
    Parser,
    add_json_flag,
    check_image_names,
    check_output,
    check_picture,
    has_flag,
    image_names,
    is_folder,
    save_figure,
    save_images,
    writing,
)
from vit_jax.commands._tables import columns_of, csv_bytes
from vit_jax.errors import EXIT_FAILED, UserError, nearest, one_line

if TYPE_CHECKING:
    from vit_jax.viz.photo import Context, Photo

HELP_FLAGS = {'-h', '--help'}
TABLES = ('.csv', '.parquet')
MAX_DRAWN = 100  # most images in one picture


def main(argv: Sequence[str]) -> int:
    """Print a table for each image, or JSON; draw pictures with `--out`.

    Images that cannot be read are left out and named; then the exit code is EXIT_FAILED.
    """
    parser = Parser('predict', f'{__doc__} After MODEL, --help also shows the flags of its task.')
    add_flags(parser, argv, images='+')
    viz, args = add_task_flags(parser, argv)
    args = parser.parse_args(argv, args)
    from vit_jax.inference.images import list_images
    from vit_jax.inference.predict import adapt_run
    from vit_jax.runtime import compile_cache

    args.image = list_images(args.image)
    check_format_flag(args, viz)
    check_out_flag(args)
    check_table_flag(args)
    numbers = coco_image_ids(args, viz)
    run, context = adapt_run(open_model(parser, args), viz, args)
    compile_cache.enable()
    results, pictures, failed = predict_files(run, viz, context, args)
    if pictures:
        save_figure(viz.draw(*zip(*pictures, strict=True), context), args.out, '--out')
    if (args.json or args.coco is not None) and viz.coco:
        warn_of_unknown_ids(run)
    if args.coco is not None:
        read = [
            number for number, file in zip(numbers, args.image, strict=True) if file not in failed
        ]
        write_coco_results(args.coco, read, results, viz.coco)
    if args.format == 'yolo':
        write_names(args.out, results, context)
    if args.table is not None:
        write_table(args.table, results, viz.columns or (), args.one_row)
    if args.json:
        left_out = [{'image': file, 'error': str(error)} for file, error in failed.items()]
        print(json.dumps({'step': run.step, 'images': results, 'left_out': left_out}))
    else:
        for path in filter(None, (args.out, args.coco, args.table)):
            print(path)
    if failed:
        print(f'{len(failed)} of {len(args.image)} images are left out', file=sys.stderr)
    return EXIT_FAILED if failed else 0


def add_flags(parser: Parser, argv: Sequence[str], images: str) -> None:
    """Add MODEL, the images, as many as `nargs=images`, and the flags that all tasks have."""
    add_model_flags(parser, argv)
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='picture to write (PNG, SVG, PDF or JPEG), or a folder for one picture per file',
    )
    add_json_flag(parser)
    parser.add_argument(
        '--table',
        metavar='FILE',
        help='.csv or .parquet file with a row per prediction, instead of printed tables',
    )
    parser.add_argument(
        '--one-row', action='store_true', help='write one row per image to the file of --table'
    )
    add_coco_flags(parser)
    parser.add_argument('--seed', type=int, default=0, help='random seed (default: 0)')
    parser.add_argument(
        'image',
        nargs=images,
        help="JPEG, PNG or WebP files, folders of them, or quoted patterns such as 'a/**/*.jpg'",
    )


def add_coco_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--coco`, `--format` and `--annotations`."""
    parser.add_argument(
        '--coco',
        metavar='FILE',
        help="file for the objects in COCO's results format, for pycocotools' loadRes; add "
        '--threshold 0 to measure AP',
    )
    parser.add_argument(
        '--format',
        choices=FORMATS,
        help='write boxes to --out instead of pictures: a folder with a file per image and the '
        'names of the classes (yolo, voc), or a JSON file, as by --coco',
    )
    parser.add_argument(
        '--annotations',
        metavar='FILE',
        help='annotation file that lists the image ids of --coco (default: the file names are the '
        'ids, as in COCO)',
    )


def add_task_flags(parser: Parser, argv: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Add the flags of the task's `Viz` to the parser.

    Returns:
      `Viz`, or None for `--help` without a model; and the parsed flags of the model.

    Raises:
      UserError: Not exactly one model is named, or its task does not have an allowed module in
        `viz`.
    """
    args = parse_model(parser, argv)
    if args is None:
        return None, argparse.Namespace()
    from vit_jax.config.origin import require_name
    from vit_jax.viz import predictions

    task = task_name(args)
    require_name(predictions.module_path(task), args.allow, f'the visualization of task {task!r}')
    viz = predictions.require(task)
    viz.add_flags(parser)
    return viz, args


def parse_model(parser: Parser, argv: Sequence[str]) -> argparse.Namespace | None:
    """Parse the flags that name the model; None for `--help` without a model.

    The flags of its task are still unknown, so MODEL has to come before them.

    Raises:
      UserError: Not exactly one model is named.
    """
    arguments = [word for word in argv if word not in HELP_FLAGS]
    by_flag = has_flag(arguments, MODEL_FLAGS)
    if (
        len(arguments) < len(argv)
        and not by_flag
        and all(word.startswith('-') for word in arguments)
    ):
        return None
    flags = Parser('predict', None)
    add_flags(flags, argv, images='*')
    args, unknown = flags.parse_known_intermixed_args(arguments)
    unknown_flag = unknown[0].partition('=')[0] if unknown else ''
    if not by_flag and unknown_flag.startswith('--'):
        if difflib.get_close_matches(unknown_flag, MODEL_FLAGS, cutoff=0.7):
            parser.error(nearest('flag', unknown_flag, MODEL_FLAGS))
        if arguments.index(unknown[0]) < arguments.index(args.model):
            parser.error(f'name the model before {unknown_flag}: predict MODEL FILE...')
    check_model_flags(parser, args)
    return args


def list_inputs(args: argparse.Namespace) -> list[str | None]:
    """List what the command reads, for `check_output`."""
    return [*args.image, args.annotations, args.model]


def check_out_flag(args: argparse.Namespace) -> None:
    """Raise UserError if the picture or folder of `--out` cannot be written."""
    if args.out is None or args.format is not None:
        return
    if is_folder(args.out):
        check_image_names(image_names(args.image), args.image, args.out, '--out')
        return
    if len(args.image) > MAX_DRAWN:
        raise UserError(
            f'--out {args.out!r}: {len(args.image)} images, but at most {MAX_DRAWN} fit into one '
            'picture: name a folder to get a picture of each'
        )
    check_picture(args.out, '--out', list_inputs(args))


def check_table_flag(args: argparse.Namespace) -> None:
    """Raise UserError if the file of `--table` cannot be written."""
    if args.table is None:
        if args.one_row:
            raise UserError('--one-row changes the file of --table: give both')
        return
    if not args.table.lower().endswith(TABLES):
        raise UserError(f'--table {args.table!r}: the name must end in {" or ".join(TABLES)}')
    check_output(args.table, '--table', list_inputs(args))


def coco_image_ids(args: argparse.Namespace, viz: Any) -> list[int]:
    """Find the COCO id of each image; empty without `--coco`.

    Raises:
      UserError: The task does not detect objects, or the id of an image is missing.
    """
    if args.coco is None:
        if args.annotations is not None:
            raise UserError('--annotations lists the image ids for --coco: give both')
        return []
    if not viz.coco:
        raise UserError('--coco applies to tasks that detect objects, such as detect')
    check_output(args.coco, '--coco', list_inputs(args))
    if args.annotations is not None:
        image_ids = _read_image_ids(args.annotations)
        return [_find_id(image_ids, file, args.annotations) for file in args.image]
    return [_id_from_name(file) for file in args.image]


def _read_image_ids(path: str) -> dict[str, int]:
    """Read {file name: id} from an annotation file."""
    from vit_jax.storage import paths

    try:
        content = paths.parse_json(paths.read_bytes(path, paths.TABLE))
        return {image['file_name']: int(image['id']) for image in content['images']}
    except OSError as e:
        raise UserError(f'--annotations {path!r} cannot be read: {e.strerror}') from e
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise UserError(
            f'--annotations {path!r} is not in COCO format: images lack id and file_name'
        ) from e


def _find_id(ids: Mapping[str, int], file: str, path: str) -> int:
    parts = pathlib.Path(file).absolute().parts
    tails = ('/'.join(parts[start:]) for start in range(1, len(parts)))
    number = next((ids[tail] for tail in tails if tail in ids), None)
    if number is None:
        raise UserError(f'--annotations {path!r} does not list the image {file!r}')
    return number


def _id_from_name(file: str) -> int:
    stem = pathlib.Path(file).stem
    if not (stem.isascii() and stem.isdecimal()):
        raise UserError(
            f'--coco: the name of {file!r} is not an image id such as 000000397133.jpg: give '
            '--annotations FILE, which lists the ids'
        )
    return int(stem)


def predict_files(
    run: Any, viz: Any, context: Context, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[tuple[Any, Photo]], dict[str, UserError]]:
    """Predict for the files, and print tables and save pictures of single files on the way.

    Returns:
      Results of the readable files; their predictions and photos, if `--out` is one picture of
      all; and the errors of the other files.

    Raises:
      UserError: None of the files can be read.
    """
    from vit_jax.inference.images import photo_reader
    from vit_jax.inference.predict import predictor
    from vit_jax.runtime.console import Console

    reader, predict_one, size = photo_reader(run), predictor(run, args.seed), image_size(args)
    names = dict(zip(args.image, image_names(args.image), strict=True))
    boxes = dict(zip(args.image, box_files(args.image, args.format), strict=True))
    console, prints = Console(), not args.json and args.table is None
    results, pictures, failed = [], [], {}
    for file in args.image:
        try:
            photo = reader.read(file, size)
        except UserError as error:
            if len(args.image) == 1:
                raise
            failed[file] = error
            print(f'left out: {error}', file=sys.stderr)
            continue
        prediction = predict_one(photo.fields, photo.number)
        rows = viz.rows(prediction, photo, context)
        results.append({'image': str(photo.path), 'read_as': photo.note, 'predictions': rows})
        if prints:
            console.print(title(results[-1]), soft_wrap=True)
            text = (
                format_table(rows, viz.columns, viz.bar) if rows else viz.note(prediction, context)
            )
            console.print(text)
            console.print()
        if args.format in FOLDERS:
            write_boxes(args.out, boxes[file], photo, rows, context.class_ids)
        elif args.out is not None and is_folder(args.out):
            picture = viz.image(prediction, photo, context)
            save_images([picture], [names[file]], args.out, '--out')
        elif args.out is not None:
            pictures.append((prediction, photo))
    if not results:
        raise UserError(f'none of the {len(args.image)} images can be read')
    return results, pictures, failed


def warn_of_unknown_ids(run: Any) -> None:
    """Warn that `category_id` is the class number where the category ids are unknown."""
    if not run.class_ids:
        note = 'its category ids are unknown: category_id is the class number, counted from 0'
        print(f'{one_line(str(run.path))}: {note}', file=sys.stderr)


def write_coco_results(
    path: str, ids: Sequence[int], results: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> None:
    """Write the predictions of all images in COCO's results format.

    Args:
      path: File to write.
      ids: COCO ids of the images.
      results: Images, each with its `predictions`.
      keys: Keys of a prediction, written next to `image_id`.

    Raises:
      UserError: The file cannot be written.
    """
    from vit_jax.storage import paths

    rows = [
        {'image_id': number, **{key: row[key] for key in keys}}
        for number, result in zip(ids, results, strict=True)
        for row in result['predictions']
    ]
    with writing(path, '--coco'):
        paths.write_text_atomic(path, json.dumps(rows) + '\n')


def write_table(
    path: str,
    results: Sequence[Mapping[str, Any]],
    columns: Sequence[str] = (),
    one_row: bool = False,
) -> None:
    """Write a CSV or Parquet file with a row per prediction, or per image.

    A prediction has its rank in the image, from 1, and a box in four columns; with a row per image
    the columns of the second prediction end in `_2`. An image without predictions has one row with
    empty cells. In CSV, other lists are JSON, and an apostrophe precedes text that begins like a
    formula.

    Args:
      path: File; its suffix is the format.
      results: Images, each with its `predictions`.
      columns: Columns that are written even if there are no predictions.
      one_row: Whether an image has one row.

    Raises:
      UserError: The file cannot be written.
    """
    from vit_jax.storage import paths
    from vit_jax.viz import predictions

    rows = [
        row
        for result in results
        for row in predictions.table_rows(result['image'], result['predictions'], one_row=one_row)
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if names == ['image']:
        names += [
            column for name in columns for column in predictions.BOX_COLUMNS.get(name, (name,))
        ]
    cells = columns_of(rows, names)
    encode = _parquet_bytes if path.lower().endswith('.parquet') else csv_bytes
    with writing(path, '--table'):
        paths.write_atomic(path, encode(cells))


def _parquet_bytes(cells: Mapping[str, list[Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table(cells), file)
    return file.getvalue()


def title(result: dict[str, Any]) -> Any:
    """Format the name of an image, and how it was read."""
    from rich.text import Text

    return Text.assemble((one_line(result['image']), 'bold'), f'  {result["read_as"]}')


def format_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str] | None, bar: str | None
) -> Any:
    """Format the rows of one image as a table with right-aligned numbers."""
    from rich.text import Text

    from vit_jax.runtime.console import Table

    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    formatted = Table()
    for name in names:
        text = any(isinstance(row.get(name), str) for row in rows)
        formatted.add_column(
            name, justify='left' if text else 'right', min_width=16 if text else None
        )
    if bar is not None:
        formatted.add_column(min_width=20)
    for row in rows:
        blocks = [Text('█' * round(20 * row[bar]), 'blue')] if bar is not None else []
        formatted.add_row(*(format_cell(row.get(name)) for name in names), *blocks)
    return formatted


def format_cell(value: Any) -> str:
    """Format a value: floats with four digits, or with one in a list, such as pixels of a box."""
    if value is None:
        return ''
    if isinstance(value, (list, tuple)):
        return ', '.join(f'{v:.1f}' if isinstance(v, float) else str(v) for v in value)
    return f'{value:.4f}' if isinstance(value, float) else str(value)
