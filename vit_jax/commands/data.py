"""Show a batch as the model sees it, count the examples, and time the data pipeline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import Parser, add_json_flag, align, check_picture, save_figure
from vit_jax.config.load import model_and_task, parse_config_args, to_run
from vit_jax.errors import UserError, one_line, positive_number

if TYPE_CHECKING:
    from vit_jax.profiling.pipeline import Throughput

_log = logging.getLogger(__name__)
SHOWN = 32  # most examples in the picture
LISTED = 20  # most classes, and broken files, in the text


def main(argv: Sequence[str]) -> int:
    """Print counts and rates; draw a picture with `--out`.

    Raises:
      UserError: A config is missing.
    """
    parser = Parser('data', __doc__)
    parser.add_argument('--out', metavar='FILE', help='picture of the first training batch')
    parser.add_argument(
        '--batches',
        type=positive_number,
        default=2,
        metavar='N',
        help='least number of batches to read, 1 for no timing (default: as many as a few seconds '
        'allow)',
    )
    parser.add_argument(
        '--read-all',
        action='store_true',
        help='read every example once, to find all broken files, count all objects, and find '
        'evaluation images that are also training images',
    )
    parser.add_argument(
        '--bench',
        action='store_true',
        help='time each stage of an example on one core; --out draws these times',
    )
    add_json_flag(parser)
    args, config = parse_config_args(parser, argv)
    if config is None:
        raise UserError('data needs a config: data CONFIG')
    from vit_jax.data import census
    from vit_jax.inference import fine_tune
    from vit_jax.profiling import pipeline
    from vit_jax.runtime import console, sharding
    from vit_jax.trainer.evaluations import open_data

    if args.out is not None:
        check_picture(args.out, '--out', [to_run(config).data.source])
    config = fine_tune.complete_config(config).config
    layout = sharding.make_layout()
    run = to_run(config)
    data = open_data(run.data, run.batch_size, layout, run.seed)
    if args.bench:
        return time_stages(data, layout, args)
    with console.progress('batches', None, quiet=args.json) as advance:
        pace = pipeline.measure_throughput(data, args.batches, lambda _: advance())
    counts = census.count(data, args.read_all)
    copies = find_copies(run, data, layout) if args.read_all else {}
    rates = {f'{name}_per_sec': rate for name, rate in pace.per_sec.items()}
    result = {**dataclasses.asdict(counts), 'first_batch_sec': pace.first_sec, **rates}
    result |= {'made_by': str(pace.loading)} | ({'copies': copies} if args.read_all else {})
    if rates:
        result |= {'timed_sec': pace.seconds, 'slowest': pace.slowest, 'fastest': pace.fastest}
    path = None
    if args.out is not None:
        path = save_figure(draw_batch(config, data, pace.first), args.out, '--out')
    print(json.dumps(result) if args.json else describe(result, pace, len(counts.broken)))
    if path is not None and not args.json:
        print(path)
    return 0


def find_copies(run: Any, data: Any, layout: Any) -> dict[str, list[tuple[str, str]]]:
    """Find evaluation images that are also training images.

    Returns:
      {evaluation: pairs of names, the training image's first}.
    """
    from vit_jax.data.shared import shared_images
    from vit_jax.trainer.evaluations import open_data

    copies = {}
    for name, entry in run.evals.items():
        try:
            held_out = open_data(entry, run.batch_size, layout, run.seed)
        except UserError as error:
            _log.warning('config.evals.%s is not compared: %s', name, error)
            continue
        copies[name] = shared_images(data.source, held_out.source)
    return copies


def time_stages(data: Any, layout: Any, args: argparse.Namespace) -> int:
    """Print the time of each stage of the pipeline for one example; draw it with `--out`."""
    import jax

    from vit_jax.data import native
    from vit_jax.profiling import pipeline
    from vit_jax.runtime import environment
    from vit_jax.viz import batch

    def put(batch: dict[str, Any]) -> None:
        jax.block_until_ready(layout.put_batch(batch))

    seconds = pipeline.measure_stages(data, pipeline.EXAMPLES, put)
    path = None
    if args.out is not None:
        path = save_figure(batch.draw_stages(seconds), args.out, '--out')
    total, available = sum(seconds.values()), environment.available_cores()
    if args.json:
        print(
            json.dumps({'stages_sec': seconds, 'per_core_per_sec': 1 / total, 'cores': available})
        )
        return 0
    rows = [['stage', 'ms per example', 'share']]
    rows += [[name, f'{sec * 1e3:.3f}', f'{sec / total:.0%}'] for name, sec in seconds.items()]
    print(align(rows, left=1))
    print(f'{1 / total:,.0f} examples/s on one core; this process may use {available}')
    if data.plan.examples.transforms.crop_first and not native.has_windows():
        print('JPEG files are decoded whole: with gcc or clang, install the package once more')
    if path is not None:
        print(path)
    return 0


def draw_batch(config: Any, data: Any, batch: dict[str, Any]) -> Any:
    """Draw the first examples of a batch with the `Viz` of the task.

    Raises:
      UserError: The `Viz` cannot draw such a batch.
    """
    import numpy as np

    from vit_jax.config.defaults import fill_sizes
    from vit_jax.inference import example_set
    from vit_jax.viz import predictions

    run = to_run(config)
    _, task = model_and_task(fill_sizes(config, data.info))
    batch = example_set.augment(task, batch)
    images = example_set.model_images(task, batch)
    count = min(SHOWN, len(next(iter(batch.values()))))
    rows = {k: v if v.ndim else [v] * count for k, v in batch.items()}
    examples = [{k: np.asarray(v[i]) for k, v in rows.items()} for i in range(count)]
    context = example_set.make_context(data, run.data, model=run.model.name)
    viz = predictions.find_viz(run.task.name)
    try:
        return viz.draw_batch(None if images is None else list(images[:count]), examples, context)
    except UserError as error:
        raise UserError(f'--out: {error}') from error


def describe(result: dict[str, Any], pace: Throughput, broken: int) -> str:
    """Format the result as text."""
    lines = [f'{result["title"]}: {result["examples"]:,} examples']
    classes = [[name, f'{count:,}'] for name, count in result['classes'].items()]
    if classes:
        lines.append(align(classes[:LISTED], left=1))
    if len(classes) > LISTED:
        lines.append(f'and {len(classes) - LISTED} more classes; --json lists all')
    lines.append(f'batches are made by {pace.loading}; the first one after {pace.first_sec:.2f} s')
    steady = f'{pace.slowest:.0%} to {pace.fastest:.0%} of it in parts of {pace.seconds:.1f} s'
    lines += [f'{rate:,.0f} {name}/s ({steady})' for name, rate in pace.per_sec.items()]
    lines.append(f'{broken} broken' + ':' * bool(broken))
    lines += [f'  {one_line(name)}' for name in result['broken'][:LISTED]]
    for name, pairs in result.get('copies', {}).items():
        lines.append(f'config.evals.{name}: {len(pairs):,} images are also training images')
        lines += [
            f'  {one_line(eval_file)} is {one_line(train_file)}'
            for train_file, eval_file in pairs[:LISTED]
        ]
    return '\n'.join(lines)
