"""Evaluate a model exactly: every example of the split counts once."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, open_model
from vit_jax.commands._parser import (
    FIT,
    Parser,
    add_json_flag,
    align,
    batch_size_or_fit,
    check_picture,
    save_figure,
)
from vit_jax.errors import UserError

MAX_CLASSES = 1000  # most classes of a report that shows classes without examples


def main(argv: Sequence[str]) -> int:
    """Print the metrics of a model on the run's evaluations or other data.

    Raises:
      UserError: A checkpoint is given without `--source` and `--split`.
    """
    parser = Parser('evaluate', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument(
        '--source',
        help="source of other data, such as 'tfds:NAME' or 'folder:PATH' (default: the run's)",
    )
    parser.add_argument('--split', help="split of the data, such as 'test' (default: the run's)")
    parser.add_argument(
        '--classes',
        type=parse_classes,
        metavar='I,J,...',
        help='class numbers to evaluate, from 0 (default: all)',
    )
    parser.add_argument(
        '--evaluator',
        action='append',
        default=[],
        metavar='NAME',
        help="evaluator such as 'knn' or 'fewshot(shots=(1, 5))'; may be repeated (default: the "
        "run's evaluators)",
    )
    parser.add_argument(
        '--fit', metavar='SPLIT', help='split that evaluators fit to (default: train)'
    )
    parser.add_argument(
        '--batch-size',
        type=batch_size_or_fit,
        metavar='N|fit',
        help='examples per batch, over all devices; fit for the most that memory holds '
        "(default: the run's)",
    )
    parser.add_argument(
        '--report',
        metavar='FILE',
        help='picture of the confusion matrix, or of average precision by class for a detector; '
        'prints the result of each class, too',
    )
    from vit_jax.viz import generate

    generate.add_sampling_flags(parser)
    add_json_flag(parser, ', with every metric')
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    if args.report is not None:
        check_picture(args.report, '--report', [args.source, args.model])
    from vit_jax.storage.model_ref import ModelRef

    if (
        args.workdir is None
        and None in (args.source, args.split)
        and ModelRef.parse(args.model).find_run() is None
    ):
        raise UserError(
            f'{args.model!r} is not a run, so its data are unknown: give --source and --split'
        )
    from vit_jax.runtime import compile_cache
    from vit_jax.trainer import batch_fit, measure

    compile_cache.enable()
    prepare = functools.partial(
        measure.prepare,
        with_sampling_flags(open_model(parser, args), args),
        source=args.source,
        split=args.split,
        classes=args.classes,
        image_size=image_size(args),
        evaluators=args.evaluator,
        fit=args.fit,
        allowed=args.allow,
    )
    if args.batch_size == FIT:
        args.batch_size = batch_fit.largest_batch(prepare())
        print(f'batches of {args.batch_size:,} fit', file=sys.stderr)
    prepared = prepare(batch_size=args.batch_size)
    report = add_report(prepared) if args.report is not None else None
    results = prepared.run()
    classes = {} if report is None else {'classes': write_report(*report, args.report)}
    step = prepared.trained.step
    if args.json:
        print(json.dumps({'step': step, **results, **classes}))
        return 0
    for title, evaluation in prepared.evaluations.items():
        if evaluation.signature:
            print(f'{title}: {evaluation.signature}')
    shown = prepared.line(results)
    print(shown if step is None else f'step {step}  {shown}')
    if classes:
        print(f'{class_table(classes["classes"])}\n{args.report}')
    return 0


def with_sampling_flags(trained: Any, args: argparse.Namespace) -> Any:
    """Apply `--guidance`, `--steps` and `--sampler` to the model's task.

    Raises:
      UserError: A flag is set, and the task does not generate images.
    """
    from vit_jax.tasks.generate import Task
    from vit_jax.viz import generate

    flags = [name for name in generate.SAMPLING if getattr(args, name) is not None]
    if not flags:
        return trained
    if not isinstance(trained.task, Task):
        raise UserError(
            f'--{flags[0]}: the task {trained.settings.task.name!r} does not generate images'
        )
    return trained.adapted(task=generate.with_sampling_flags(trained.task, args))


def parse_classes(text: str) -> tuple[int, ...]:
    """Parse '8,9' as (8, 9).

    Raises:
      UserError: The text is anything but integers.
    """
    try:
        return tuple(int(word) for word in text.split(','))
    except ValueError as e:
        raise UserError(f"--classes {text!r}: write class numbers, such as '8,9'") from e


def add_report(prepared: Any) -> tuple[Any, Any]:
    """Add a confusion matrix to the first evaluation, unless one measures objects.

    Returns:
      Evaluator and its data.

    Raises:
      UserError: The data do not have classes, or the task does not predict.
    """
    from vit_jax.evaluators import coco_ap, confusion
    from vit_jax.trainer.evaluations import Evaluation

    for evaluation in prepared.evaluations.values():
        if isinstance(evaluation.evaluator, coco_ap.Evaluator):
            return evaluation.evaluator, evaluation.data
    if not prepared.trained.task.predicts:
        name = prepared.trained.settings.task.name
        raise UserError(f'--report needs predicted classes: task {name!r} does not predict any')
    (title, first), evaluator = next(iter(prepared.evaluations.items())), confusion.Evaluator()
    try:
        evaluator.open(first.data)
    except UserError as e:
        raise UserError(f'--report: {first.data.source.title}: {e}') from e
    prepared.evaluations[f'{title}_classes'] = Evaluation(
        first.data, evaluator, ema_decay=first.ema_decay
    )
    return evaluator, first.data


def write_report(evaluator: Any, data: Any, path: str) -> dict[str, Any]:
    """Draw the confusion matrix, or objects' average precision; return a row for each class."""
    from vit_jax.evaluators import coco_ap, confusion
    from vit_jax.viz import charts

    if isinstance(evaluator, coco_ap.Evaluator):
        rows = evaluator.rows(
            data.info.class_names or tuple(map(str, range(data.info.num_classes)))
        )
        save_figure(charts.draw_class_precision(rows, data.source.title), path, '--report')
        return {'rows': rows}
    matrix, names = evaluator.matrix, data.info.class_names
    names += tuple(map(str, range(len(names), len(matrix))))
    if len(matrix) > MAX_CLASSES:  # the data may have only a few classes of the model's head
        nonempty = (matrix.any(axis=0) | matrix.any(axis=1)).nonzero()[0]
        matrix, names = matrix[nonempty][:, nonempty], tuple(names[label] for label in nonempty)
    save_figure(charts.draw_confusion(matrix, names, data.source.title), path, '--report')
    return {'rows': confusion.rows(matrix, names), 'matrix': matrix.tolist()}


def class_table(report: dict[str, Any]) -> str:
    """Format the rows of the classes as a text table, the least accurate first."""
    if 'matrix' not in report:
        rows = sorted(
            (row for row in report['rows'] if row['AP'] is not None), key=lambda row: row['AP']
        )
        cells = [
            [row['class'], f'{row["AP"]:.4f}', f'{row["AP50"]:.4f}', f'{row["objects"]:,}']
            for row in rows
        ]
        return align([['class', 'AP', 'AP50', 'objects'], *cells], left=1)
    measured = [row for row in report['rows'] if row['accuracy'] is not None]
    lines = [
        [
            row['class'],
            f'{row["accuracy"]:.4f}',
            f'{row["examples"]:,}',
            row['most_confused_with'] or '',
        ]
        for row in sorted(measured, key=lambda row: row['accuracy'])
    ]
    return align([['class', 'accuracy', 'examples', 'most confused with'], *lines], left=1)
