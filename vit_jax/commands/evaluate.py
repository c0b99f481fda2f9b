"""Evaluate a model exactly: every example of the split counts once."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._evaluators import (
    add_evaluator_flags,
    data_keywords,
    evaluator_entries,
    parse_classes,
)
from vit_jax.commands._model import add_model_flags, check_model_flags, image_size, open_model
from vit_jax.commands._parser import Parser, align
from vit_jax.commands._pictures import save_figure
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Prints {name/metric: value} of a run, for its own evaluations or other data."""
    parser = Parser('evaluate', __doc__)
    add_model_flags(parser)
    parser.add_argument('--source', help="other data, as 'tfds:NAME' or 'folder:PATH'")
    parser.add_argument('--split', help='another split of it')
    parser.add_argument(
        '--classes', type=parse_classes, metavar='I,J,...', help='only these, numbered from 0 on'
    )
    add_evaluator_flags(parser)
    parser.add_argument('--batch-size', type=int)
    parser.add_argument(
        '--report',
        metavar='FILE',
        help='accuracy of each class too, and the confusion matrix as a picture',
    )
    parser.add_argument('--json', action='store_true', help='print JSON only')
    args = parser.parse_args(argv)
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f'--batch-size {args.batch_size}: must be at least 1')
    check_model_flags(parser, args)
    if args.report is not None:
        from vit_jax.viz.figures import check_format

        check_format(args.report, '--report')
    if args.checkpoint is not None and None in (args.source, args.split):
        raise UserError('--checkpoint says nothing of data: give --source and --split')
    entries = evaluator_entries(args.evaluator, args.fit)
    from vit_jax.inference.load import crop
    from vit_jax.runtime import sharding
    from vit_jax.trainer import evaluate, evaluations

    sharding.use_compilation_cache()
    run = open_model(parser, args)
    given = {k: getattr(args, k) for k in ('source', 'split', 'classes', 'batch_size')}
    if entries:
        choose_evaluators(run, entries)
    if (size := image_size(args)) is not None:
        require_crops(run.config.evals, args.image_size)
        given['transforms'] = crop(size)
    choose_data(run, {k: v for k, v in given.items() if v is not None})
    titles = {} if entries else titles_by_split(run, args.split)
    layout = sharding.make_layout()
    steps = evaluate.compile_steps(run.model, run.task, layout, run.config.get('seed', 0))
    evals = evaluations.open_evals(run.config, layout, steps, trained(run))
    variables = layout.create(lambda loaded: loaded, run.variables)
    titled = {titles.get(name, name): one for name, one in evals.items()}
    reported = None
    if args.report is not None:
        title, of = next(iter(titled.items()))
        reported = confusion_of(of.data)
        titled[f'{title}_classes'] = evaluations.Evaluation(of.data, reported)
    results = evaluations.run(steps, titled, variables)
    classes = {} if reported is None else {'classes': write_report(reported, of.data, args.report)}
    if args.json:
        print(json.dumps({'step': run.step, **results, **classes}))
    else:
        for title, one in titled.items():
            if one.signature:
                print(f'{title}: {one.signature}')
        step = '' if run.step is None else f'step {run.step}  '
        print(step + '  '.join(f'{k} {v:.4f}' for k, v in results.items()))
        if classes:
            print(f'{class_table(classes["classes"])}\n{args.report}')
    return 0


def confusion_of(data: Any) -> Any:
    """An evaluator that sees which classes are taken for which; UserError without classes."""
    from vit_jax.evaluators import confusion

    evaluator = confusion.Evaluator()
    try:
        evaluator.open(data)
    except UserError as e:
        raise UserError(f'--report: {data.source.title}: {e}') from e
    return evaluator


def write_report(evaluator: Any, data: Any, path: str) -> dict[str, Any]:
    """Draws the confusion matrix, and returns it with the rows of the classes."""
    from vit_jax.evaluators import confusion
    from vit_jax.viz import confusion as viz

    names = data.info.class_names or tuple(map(str, range(data.info.num_classes)))
    save_figure(viz.draw(evaluator.matrix, names, data.source.title), path, '--report')
    return {'rows': confusion.rows(evaluator.matrix, names), 'matrix': evaluator.matrix.tolist()}


def class_table(report: dict[str, Any]) -> str:
    """The rows of the classes as columns of text, the least accurate first."""
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


def trained(run: Any) -> Any:
    """The `Trained` of a run, with the size and channels of its images."""
    import numpy as np

    from vit_jax.data.batches import ArraySpec
    from vit_jax.trainer.suits import Trained

    spec = {}
    if run.input_size and run.image:
        spec['image'] = ArraySpec((*run.input_size, run.image['channels']), np.dtype(np.float32))
    return Trained(run.model, run.task, run.variables['params'], run.trained_on, spec)


def choose_evaluators(run: Any, entries: dict[str, dict[str, Any]]) -> None:
    """Replaces the evaluations of a run by others of the same data."""
    from vit_jax.inference.load import eval_section

    data = data_keywords(eval_section(run.config))
    with run.config.unlocked():
        run.config.evals = {name: data | entry for name, entry in entries.items()}


def choose_data(run: Any, given: dict[str, Any]) -> None:
    """Puts the flags into the evaluations of a run, or makes one where there is none.

    Raises:
      UserError: if a checkpoint of another code base does not suit the data.
    """
    with run.config.unlocked():
        if not run.config.evals:
            run.config.evals[given['split']] = {**run.config.data}
        for section in run.config.evals.values():
            section.update(given)
    if run.step is None:
        for section in run.config.evals.values():
            require_fit(run, section)


def require_crops(evals: Any, size: str) -> None:
    """Raises UserError for --image-size where what is evaluated are whole images."""
    for name, section in evals.items():
        if section.get('sizes'):
            raise UserError(
                f'--image-size {size}: the model gets whole images, padded to '
                f'config.evals.{name}.sizes, and takes those of any size; leave the flag out'
            )


def titles_by_split(run: Any, split: str | None) -> dict[str, str]:
    """Names for the evaluations of a run that all read another split; of equal ones, one stays.

    Returns:
      {entry of config.evals: what its results are called}; empty if no split is given.
    """
    if split is None:
        return {}
    kept: dict[str, Any] = {}
    for name, section in run.config.evals.items():
        measured = {k: v for k, v in section.items() if k not in ('every', 'batch_size')}
        if measured not in kept.values():
            kept[name] = measured
    with run.config.unlocked():
        run.config.evals = {name: run.config.evals[name] for name in kept}
    titles = {
        name: '_'.join(filter(None, [split, section.get('evaluator')]))
        for name, section in kept.items()
    }
    alike = collections.Counter(titles.values())
    return {k: f'{title}_{k}' if alike[title] > 1 else title for k, title in titles.items()}


def require_fit(run: Any, section: Any) -> None:
    """Compares the data with a model of whose training data nothing is known.

    Raises:
      UserError: if the images have other colours, or the task needs other classes.
    """
    from vit_jax.data.dataset import raw_images
    from vit_jax.runtime import sharding
    from vit_jax.trainer import evaluate

    source = evaluate.open_data(section, run.config.batch_size, sharding.make_layout()).source
    have, need = raw_images(source).get('channels'), run.image['channels']
    if have != need:
        raise UserError(
            f'{run.workdir} takes images of {need} channels, {section.source} has {have}'
        )
    outputs, classes = run.config.model.get('num_classes') or 0, source.info.num_classes
    if 'evaluator' not in section and outputs != classes:
        raise UserError(
            f'{run.workdir} tells {outputs} classes apart, {section.source} has {classes}: '
            'fine-tune it with config.init.from, or give an --evaluator'
        )
