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
    check_output,
    check_picture,
    save_figure,
    writing,
)
from vit_jax.commands._tables import columns_of, csv_bytes
from vit_jax.errors import UserError

THRESHOLD = 0.5  # minimum score of an object in the confusion matrix
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
        help='picture of the confusion matrix, and for a detector average precision by class and '
        'precision-recall curves; prints the result of each class',
    )
    parser.add_argument(
        '--table', metavar='FILE.csv', help='file for the result of each class, as CSV'
    )
    parser.add_argument(
        '--threshold',
        metavar='P',
        help="minimum score of predictions in a detector's confusion matrix, precision and recall "
        f'(default: {THRESHOLD})',
    )
    from vit_jax.viz.photo import add_sampling_flags  # which imports no JAX

    add_sampling_flags(parser)
    add_json_flag(parser, ', with every metric')
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    reports = check_reports(args)
    from vit_jax.storage.model_ref import ModelRef

    if (
        args.workdir is None
        and None in (args.source, args.split)
        and (ref := ModelRef.parse(args.model)).find_run() is None
        and ref.exists()  # else reading it says so
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
    report = add_report(prepared, args, next(iter(reports))) if reports else None
    results = prepared.run()
    classes = {} if report is None else {'classes': write_report(*report, args)}
    step = prepared.trained.step
    if args.json:
        print(json.dumps({'step': step, **results, **classes}))
        return 0
    for title, evaluation in prepared.evaluations.items():
        if evaluation.signature:
            print(f'{title}: {evaluation.signature}')
    results_line = prepared.line(results)
    print(results_line if step is None else f'step {step}  {results_line}')
    if classes:
        print(class_table(classes['classes']), *reports.values(), sep='\n')
    return 0


def with_sampling_flags(trained: Any, args: argparse.Namespace) -> Any:
    """Apply `--guidance`, `--steps` and `--sampler` to the model's task.

    Raises:
      UserError: A flag is set, and the task does not generate images.
    """
    from vit_jax.tasks.generate import Task
    from vit_jax.viz import photo

    flags = [name for name in photo.SAMPLING if getattr(args, name) is not None]
    if not flags:
        return trained
    if not isinstance(trained.task, Task):
        raise UserError(
            f'--{flags[0]}: the task {trained.settings.task.name!r} does not generate images'
        )
    return trained.adapted(task=photo.with_sampling_flags(trained.task, args))


def check_reports(args: argparse.Namespace) -> dict[str, str]:
    """Return the files of the results of each class, by flag, and parse `--threshold`.

    Raises:
      UserError: A file cannot be written, or `--threshold` is not a share, or has no use.
    """
    from vit_jax.viz import detect

    files = {'--report': args.report, '--table': args.table}
    files = {flag: file for flag, file in files.items() if file is not None}
    inputs = [args.source, args.model]
    if args.report is not None:
        check_picture(args.report, '--report', inputs)
    if args.table is not None:
        if not args.table.lower().endswith('.csv'):
            raise UserError(f'--table {args.table!r}: the name must end in .csv')
        check_output(args.table, '--table', inputs)
    if args.threshold is not None:
        if not files:
            raise UserError('--threshold is for --report or --table: give one of them')
        args.threshold = detect.parse_threshold(args.threshold)
    return files


def parse_classes(text: str) -> tuple[int, ...]:
    """Parse '8,9' as (8, 9).

    Raises:
      UserError: The text is anything but integers.
    """
    try:
        return tuple(int(word) for word in text.split(','))
    except ValueError as e:
        raise UserError(f"--classes {text!r}: write class numbers, such as '8,9'") from e


def add_report(prepared: Any, args: argparse.Namespace, flag: str) -> tuple[Any, Any]:
    """Add a confusion matrix to the task's first evaluation, unless one measures objects.

    Args:
      prepared: Evaluations to run.
      args: Parsed flags.
      flag: Flag that asks for the results of each class.

    Returns:
      Evaluator and its data.

    Raises:
      UserError: The data do not have classes, the task does not predict, or `--threshold` has no
        use.
    """
    from vit_jax.evaluators import coco_ap, confusion
    from vit_jax.trainer.evaluations import Evaluation

    for evaluation in prepared.evaluations.values():
        if isinstance(evaluation.evaluator, coco_ap.Evaluator):
            return evaluation.evaluator, evaluation.data
    if args.threshold is not None:
        raise UserError('--threshold: these evaluations have no objects; add --evaluator coco_ap')
    if not prepared.trained.task.predicts:
        name = prepared.trained.settings.task.name
        raise UserError(f'{flag} needs predicted classes: task {name!r} does not predict any')
    entries = prepared.evaluations.items()
    by_task = (entry for entry in entries if entry[1].evaluator is None)
    title, measured = next(by_task, next(iter(entries)))
    evaluator = confusion.Evaluator()
    try:
        evaluator.open(measured.data)
    except UserError as e:
        raise UserError(f'{flag}: {measured.data.source.title}: {e}') from e
    prepared.evaluations[f'{title}_classes'] = Evaluation(
        measured.data, evaluator, ema_decay=measured.ema_decay
    )
    return evaluator, measured.data


def write_report(evaluator: Any, data: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Write the files of `--report` and `--table`; return a row per class and the matrix."""
    from vit_jax.evaluators import coco_ap, confusion
    from vit_jax.storage import paths
    from vit_jax.viz import charts

    names, title = data.info.class_names, data.source.title
    if isinstance(evaluator, coco_ap.Evaluator):
        threshold = THRESHOLD if args.threshold is None else args.threshold
        matrix = evaluator.confusion(threshold)
        rows = evaluator.rows(names or tuple(map(str, range(data.info.num_classes))), matrix)
        figure = charts.draw_detections(rows, evaluator.curves(), matrix, title, threshold)
    else:
        matrix = evaluator.matrix
        names += tuple(map(str, range(len(names), len(matrix))))
        if len(matrix) > MAX_CLASSES:  # the data may have only a few classes of the model's head
            nonempty = (matrix.any(axis=0) | matrix.any(axis=1)).nonzero()[0]
            matrix, names = matrix[nonempty][:, nonempty], tuple(names[i] for i in nonempty)
        rows = confusion.rows(matrix, names)
        figure = charts.draw_confusion(matrix, names, title)
    if args.report is not None:
        save_figure(figure, args.report, '--report')
    if args.table is not None:
        with writing(args.table, '--table'):
            paths.write_atomic(args.table, csv_bytes(columns_of(rows, tuple(rows[0]))))
    return {'rows': rows, 'matrix': matrix.tolist()}


def class_table(report: dict[str, Any]) -> str:
    """Format the rows of the classes as a text table, the least accurate first."""
    if 'AP' in report['rows'][0]:
        names = ('AP', 'AP50', 'precision', 'recall')
        rows = sorted(
            (row for row in report['rows'] if row['AP'] is not None), key=lambda row: row['AP']
        )
        cells = [
            [row['class'], *(_share(row[name]) for name in names), f'{row["objects"]:,}']
            for row in rows
        ]
        return align([['class', *names, 'objects'], *cells], left=1)
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


def _share(value: float | None) -> str:
    return '' if value is None else f'{value:.4f}'
