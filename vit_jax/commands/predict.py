"""Show what a trained model predicts for image files."""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.commands._model import (
    add_model_flags,
    check_model_flags,
    check_names,
    check_picture,
    image_names,
    image_size,
    is_folder,
    open_model,
    save_figure,
    save_images,
    task_name,
)
from vit_jax.commands._parser import Parser, check_output, writing
from vit_jax.errors import UserError, nearest, one_line

HELP = {'-h', '--help'}


def main(argv: Sequence[str]) -> int:
    """Prints a table an image, or JSON, and draws a picture if asked to."""
    parser = Parser('predict', f'{__doc__} With --workdir, --help shows the flags of its task.')
    add_model_flags(parser)
    parser.add_argument(
        '--out',
        metavar='FILE',
        help='a picture too: .png, .pdf, .svg or .jpg; or a folder, for one a file',
    )
    parser.add_argument('--json', action='store_true', help='print JSON only')
    add_coco_flags(parser)
    parser.add_argument('--seed', type=int, default=0, help='of what is drawn at random')
    parser.add_argument('image', nargs='+', help='JPEG, PNG or WebP files')
    viz, args = add_task_flags(parser, argv)
    args = parser.parse_args(argv, args)
    check_out(args)
    numbers = image_ids(args, viz)
    from vit_jax.inference.predict import predict_photos, read_photos, text_encoder
    from vit_jax.runtime import compile_cache
    from vit_jax.viz.photo import Context

    run = open_model(parser, args)
    names = {'class_names': run.class_names, 'class_ids': run.class_ids}
    context = Context(
        flags=args, vocab=run.vocab, model=run.config.model.name, encode=text_encoder(run), **names
    )
    model, task = viz.adapt_model(run.model, context), viz.adapt_task(run.task, context)
    run = run.adapted(model=model, task=task)
    photos = read_photos(run, args.image, image_size(args))
    compile_cache.use()
    predictions = predict_photos(run, photos, args.seed)
    results = [
        {
            'image': str(photo.path),
            'read_as': photo.note,
            'predictions': viz.rows(prediction, photo, context),
        }
        for photo, prediction in zip(photos, predictions, strict=True)
    ]
    if args.out is not None and is_folder(args.out):
        pairs = zip(predictions, photos, strict=True)
        images = (viz.image(prediction, photo, context) for prediction, photo in pairs)
        path = save_images(images, image_names(args.image), args.out, '--out')
    elif args.out is not None:
        path = save_figure(viz.draw(predictions, photos, context), args.out, '--out')
    if (args.json or args.coco is not None) and viz.coco:
        warn_of_ids(run)
    if args.coco is not None:
        write_results(args.coco, numbers, results, viz.coco)
    if args.json:
        print(json.dumps({'step': run.step, 'images': results}))
        return 0
    print_tables(results, viz.columns, viz.bar)
    if args.out is not None:
        print(path)
    if args.coco is not None:
        print(args.coco)
    return 0


def add_task_flags(parser: Parser, argv: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """The `Viz` of the run's task, its flags added to `parser`.

    Returns:
      The `Viz`, None if only the help of all tasks is wanted; and the flags of the model.

    Raises:
      UserError: if not exactly one model is named, or there is no such module, or it is not
        allowed.
    """
    from vit_jax.config.origin import require_name
    from vit_jax.viz import predictions

    model_flags = Parser('predict', None)
    add_model_flags(model_flags)
    args, rest = model_flags.parse_known_args([word for word in argv if word not in HELP])
    if HELP.intersection(argv) and args.workdir is None and args.checkpoint is None:
        return None, args  # the help of all tasks
    if args.workdir is None and args.checkpoint is None:
        require_no_misspelling(parser, rest)
    check_model_flags(parser, args)
    task = task_name(args)
    require_name(predictions.module_path(task), args.allow, f'what shows the task {task!r}')
    viz = predictions.require(task)
    viz.add_flags(parser)
    return viz, args


def require_no_misspelling(parser: Parser, words: Sequence[str]) -> None:
    """Raise UserError for a flag that is nearly one that names the model."""
    for word in words:
        flag = word.partition('=')[0]
        if difflib.get_close_matches(flag, ('--workdir', '--checkpoint'), cutoff=0.7):
            parser.error(nearest('flag', flag, ('--workdir', '--checkpoint')))


def check_out(args: argparse.Namespace) -> None:
    """Raises UserError for a picture that cannot be drawn."""
    if args.out is None:
        return
    if is_folder(args.out):
        check_names(image_names(args.image), args.image, args.out, '--out')
        return
    check_picture(args.out, '--out')


def print_tables(
    results: Sequence[dict[str, Any]], columns: Sequence[str] | None, bar: str | None
) -> None:
    """Print one table an image.

    Args:
      results: each with `image`, `read_as` and the rows of `predictions`.
      columns: the keys of a row to show; None for all.
      bar: the key whose values, in [0, 1], are drawn behind the row.
    """
    from vit_jax.runtime.console import Console

    console = Console()
    for result in results:
        console.print(title(result), soft_wrap=True)
        if result['predictions']:
            console.print(table(result['predictions'], columns, bar))
        console.print()


def title(result: dict[str, Any]) -> Any:
    """The name of an image, and the size that it was read at."""
    from rich.text import Text

    return Text.assemble((one_line(result['image']), 'bold'), f'  {result["read_as"]}')


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None, bar: str | None) -> Any:
    """The rows of one image, with right-aligned numbers."""
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
        made.add_row(*(shown(row.get(name)) for name in names), *blocks)
    return made


def shown(value: Any) -> str:
    """A value as text: fractions have four digits, those of a list, as pixels, one."""
    if value is None:
        return ''
    if isinstance(value, (list, tuple)):
        return ', '.join(f'{v:.1f}' if isinstance(v, float) else str(v) for v in value)
    return f'{value:.4f}' if isinstance(value, float) else str(value)


def add_coco_flags(parser: argparse.ArgumentParser) -> None:
    """Add the file of results, and what the ids of its images are read from."""
    parser.add_argument(
        '--coco',
        metavar='FILE',
        help="the objects as COCO's results too, which pycocotools' loadRes reads; with "
        '--threshold 0 for AP',
    )
    parser.add_argument(
        '--annotations',
        metavar='FILE',
        help='with --coco: the annotations in which the images have their ids; by default the '
        "files' names are these ids, as COCO's are",
    )


def image_ids(args: argparse.Namespace, viz: Any) -> list[int]:
    """The id of each image; empty without `--coco`.

    Raises:
      UserError: if the task finds no objects, or an image has no id.
    """
    if args.coco is None:
        if args.annotations is not None:
            raise UserError('--annotations gives ids to the images of --coco: give that too')
        return []
    if not viz.coco:
        raise UserError('--coco applies to tasks that find objects, such as detect')
    check_output(args.coco, '--coco')
    if args.annotations is not None:
        listed = _listed(args.annotations)
        return [_id_among(listed, file, args.annotations) for file in args.image]
    return [_id_of_name(file) for file in args.image]


def write_results(
    path: str, ids: Sequence[int], results: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> None:
    """Write the predictions of all images.

    Args:
      path: of the file.
      ids: of the images.
      results: the `predictions` of each.
      keys: of a prediction, that are written beside `image_id`.

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


def warn_of_ids(run: Any) -> None:
    """Say that `category_id` is the number of the class where the ids are not known."""
    if not run.class_ids:
        note = 'the ids of its categories are not known: category_id numbers its classes from 0'
        print(f'{one_line(str(run.path))}: {note}', file=sys.stderr)


def _listed(path: str) -> dict[str, int]:
    """{file name: id} of the images of an annotation file."""
    from vit_jax.storage import paths

    try:
        content = paths.parse_json(paths.read_bytes(path, paths.TABLE))
        return {image['file_name']: int(image['id']) for image in content['images']}
    except OSError as e:
        raise UserError(f'--annotations {path!r} cannot be read: {e.strerror}') from e
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise UserError(
            f'--annotations {path!r} is not in the format of COCO: it has no images with id and '
            'file_name'
        ) from e


def _id_among(listed: Mapping[str, int], file: str, path: str) -> int:
    parts = pathlib.Path(file).absolute().parts
    tails = ('/'.join(parts[start:]) for start in range(1, len(parts)))
    found = next((listed[tail] for tail in tails if tail in listed), None)
    if found is None:
        raise UserError(f'--annotations {path!r} lists no image {file!r}')
    return found


def _id_of_name(file: str) -> int:
    stem = pathlib.Path(file).stem
    if not (stem.isascii() and stem.isdecimal()):
        raise UserError(
            f'--coco: the name of {file!r} is not an image id, as 000000397133.jpg is: give '
            '--annotations FILE, in which the images have their ids'
        )
    return int(stem)
