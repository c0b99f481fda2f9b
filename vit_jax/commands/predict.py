"""Show what a trained model predicts for image files."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._coco import add_coco_flags, image_ids, warn_of_ids, write_results
from vit_jax.commands._model import (
    add_model_flags,
    check_model_flags,
    image_size,
    open_model,
    task_name,
)
from vit_jax.commands._parser import Parser
from vit_jax.commands._pictures import (
    check_names,
    check_picture,
    image_names,
    is_folder,
    save_figure,
    save_images,
)
from vit_jax.errors import nearest, one_line

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
    from vit_jax.config.allowed import require_name
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
