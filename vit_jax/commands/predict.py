"""Predict for image files with a trained model."""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._model import (
    add_model_flags,
    check_model_flags,
    image_size,
    open_model,
    task_name,
)
from vit_jax.commands._parser import (
    Parser,
    check_image_names,
    check_output,
    check_picture,
    image_names,
    is_folder,
    save_figure,
    save_images,
    writing,
)
from vit_jax.errors import UserError, nearest, one_line

if TYPE_CHECKING:
    from vit_jax.viz.photo import Context, Photo

HELP_FLAGS = {'-h', '--help'}


def main(argv: Sequence[str]) -> int:
    """Print a table for each image, or JSON; draw pictures with `--out`."""
    parser = Parser('predict', f'{__doc__} With --workdir, --help shows the flags of its task.')
    add_model_flags(parser)
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='draw a picture (.png, .pdf, .svg or .jpg), or one picture per file into a folder',
    )
    parser.add_argument('--json', action='store_true', help='print JSON only')
    add_coco_flags(parser)
    parser.add_argument('--seed', type=int, default=0, help='of random draws (default: 0)')
    parser.add_argument('image', nargs='+', help='JPEG, PNG or WebP files')
    viz, args = add_task_flags(parser, argv)
    args = parser.parse_args(argv, args)
    check_out_flag(args)
    numbers = coco_image_ids(args, viz)
    from vit_jax.inference.predict import predict_photos, read_photos
    from vit_jax.runtime import compile_cache

    run, context = adapt_run(open_model(parser, args), viz, args)
    photos = read_photos(run, args.image, image_size(args))
    compile_cache.enable()
    predictions = predict_photos(run, photos, args.seed)
    results = [
        {
            'image': str(photo.path),
            'read_as': photo.note,
            'predictions': viz.rows(prediction, photo, context),
        }
        for photo, prediction in zip(photos, predictions, strict=True)
    ]
    if args.out is not None:
        path = save_pictures(args.out, viz, predictions, photos, context)
    if (args.json or args.coco is not None) and viz.coco:
        warn_of_unknown_ids(run)
    if args.coco is not None:
        write_coco_results(args.coco, numbers, results, viz.coco)
    if args.json:
        print(json.dumps({'step': run.step, 'images': results}))
        return 0
    print_tables(results, viz.columns, viz.bar)
    if args.out is not None:
        print(path)
    if args.coco is not None:
        print(args.coco)
    return 0


def add_coco_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--coco` and `--annotations`."""
    parser.add_argument(
        '--coco',
        metavar='FILE',
        help="write the objects in COCO's results format, for pycocotools' loadRes; add "
        '--threshold 0 to measure AP',
    )
    parser.add_argument(
        '--annotations',
        metavar='FILE',
        help='with --coco: the annotation file that lists the image ids (default: the file names '
        'are the ids, as in COCO)',
    )


def add_task_flags(parser: Parser, argv: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Add the flags of the task's `Viz` to the parser.

    Returns:
      The `Viz`, or None for `--help` without a model; and the parsed flags of the model.

    Raises:
      UserError: if not exactly one model is named, or its task has no module in `viz` that is
        allowed.
    """
    from vit_jax.config.origin import require_name
    from vit_jax.viz import predictions

    model_flags = Parser('predict', None)
    add_model_flags(model_flags)
    args, rest = model_flags.parse_known_args([word for word in argv if word not in HELP_FLAGS])
    if HELP_FLAGS.intersection(argv) and args.workdir is None and args.checkpoint is None:
        return None, args
    if args.workdir is None and args.checkpoint is None:
        refuse_misspelled_model_flag(parser, rest)
    check_model_flags(parser, args)
    task = task_name(args)
    require_name(predictions.module_path(task), args.allow, f'the visualization of task {task!r}')
    viz = predictions.require(task)
    viz.add_flags(parser)
    return viz, args


def refuse_misspelled_model_flag(parser: Parser, words: Sequence[str]) -> None:
    """Raise UserError if a flag looks like a misspelled `--workdir` or `--checkpoint`."""
    for word in words:
        flag = word.partition('=')[0]
        if difflib.get_close_matches(flag, ('--workdir', '--checkpoint'), cutoff=0.7):
            parser.error(nearest('flag', flag, ('--workdir', '--checkpoint')))


def check_out_flag(args: argparse.Namespace) -> None:
    """Raise UserError if the picture or folder of `--out` cannot be written."""
    if args.out is None:
        return
    if is_folder(args.out):
        check_image_names(image_names(args.image), args.image, args.out, '--out')
        return
    check_picture(args.out, '--out')


def coco_image_ids(args: argparse.Namespace, viz: Any) -> list[int]:
    """The COCO id of each image; empty without `--coco`.

    Raises:
      UserError: if the task does not detect objects, or an image has no id.
    """
    if args.coco is None:
        if args.annotations is not None:
            raise UserError('--annotations lists the image ids for --coco: give both')
        return []
    if not viz.coco:
        raise UserError('--coco applies to tasks that detect objects, such as detect')
    check_output(args.coco, '--coco')
    if args.annotations is not None:
        listed = _read_image_ids(args.annotations)
        return [_listed_id(listed, file, args.annotations) for file in args.image]
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
            f'--annotations {path!r} is not in COCO format: it has no images with id and file_name'
        ) from e


def _listed_id(listed: Mapping[str, int], file: str, path: str) -> int:
    parts = pathlib.Path(file).absolute().parts
    tails = ('/'.join(parts[start:]) for start in range(1, len(parts)))
    found = next((listed[tail] for tail in tails if tail in listed), None)
    if found is None:
        raise UserError(f'--annotations {path!r} lists no image {file!r}')
    return found


def _id_from_name(file: str) -> int:
    stem = pathlib.Path(file).stem
    if not (stem.isascii() and stem.isdecimal()):
        raise UserError(
            f'--coco: the name of {file!r} is not an image id such as 000000397133.jpg: give '
            '--annotations FILE, which lists the ids'
        )
    return int(stem)


def adapt_run(run: Any, viz: Any, args: argparse.Namespace) -> tuple[Any, Context]:
    """The run with the model and task that the flags of `Viz` ask for, and their context."""
    from vit_jax.inference.predict import text_encoder
    from vit_jax.viz.photo import Context

    context = Context(
        class_names=run.class_names,
        class_ids=run.class_ids,
        flags=args,
        vocab=run.vocab,
        model=run.config.model.name,
        encode=text_encoder(run),
    )
    model, task = viz.adapt_model(run.model, context), viz.adapt_task(run.task, context)
    return run.adapted(model=model, task=task), context


def save_pictures(
    out: str,
    viz: Any,
    predictions: Sequence[Mapping[str, Any]],
    photos: Sequence[Photo],
    context: Context,
) -> Any:
    """Save one picture of all files, or one per file if `--out` is a folder; return the path."""
    if not is_folder(out):
        return save_figure(viz.draw(predictions, photos, context), out, '--out')
    pairs = zip(predictions, photos, strict=True)
    images = (viz.image(prediction, photo, context) for prediction, photo in pairs)
    return save_images(images, image_names([photo.path for photo in photos]), out, '--out')


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
      path: of the file.
      ids: of the images.
      results: of the images, each with its `predictions`.
      keys: of a prediction, written beside `image_id`.

    Raises:
      UserError: if the file cannot be written.
    """
    from vit_jax.storage import paths

    rows = [
        {'image_id': number, **{key: row[key] for key in keys}}
        for number, result in zip(ids, results, strict=True)
        for row in result['predictions']
    ]
    with writing(path, '--coco'):
        paths.write_text_atomic(path, json.dumps(rows) + '\n')


def print_tables(
    results: Sequence[dict[str, Any]], columns: Sequence[str] | None, bar: str | None
) -> None:
    """Print one table per image.

    Args:
      results: of the images, each with `image`, `read_as` and the rows of `predictions`.
      columns: keys of a row to show; None for all.
      bar: a key with values in [0, 1], drawn as a bar at the end of the row.
    """
    from vit_jax.runtime.console import Console

    console = Console()
    for result in results:
        console.print(title(result), soft_wrap=True)
        if result['predictions']:
            console.print(table(result['predictions'], columns, bar))
        console.print()


def title(result: dict[str, Any]) -> Any:
    """The name of an image, and how it was read."""
    from rich.text import Text

    return Text.assemble((one_line(result['image']), 'bold'), f'  {result["read_as"]}')


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None, bar: str | None) -> Any:
    """The rows of one image as a table with right-aligned numbers."""
    from rich.text import Text

    from vit_jax.runtime.console import Table

    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    made = Table()
    for name in names:
        text = any(isinstance(row.get(name), str) for row in rows)
        made.add_column(name, justify='left' if text else 'right', min_width=16 if text else None)
    if bar is not None:
        made.add_column(min_width=20)
    for row in rows:
        blocks = [Text('█' * round(20 * row[bar]), 'blue')] if bar is not None else []
        made.add_row(*(cell(row.get(name)) for name in names), *blocks)
    return made


def cell(value: Any) -> str:
    """A value as text: floats with four digits, or with one in a list, such as pixels of a box."""
    if value is None:
        return ''
    if isinstance(value, (list, tuple)):
        return ', '.join(f'{v:.1f}' if isinstance(v, float) else str(v) for v in value)
    return f'{value:.4f}' if isinstance(value, float) else str(value)
