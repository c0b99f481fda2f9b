"""Time a config's training and forward step: images/s or tokens/s, MFU, memory."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import (
    STDOUT,
    Parser,
    add_json_flag,
    add_square_flag,
    check_output,
    write_json,
)
from vit_jax.config.load import parse_config_args, to_run
from vit_jax.errors import UserError, positive_number

if TYPE_CHECKING:
    from vit_jax.profiling.benchmark import Timing


def main(argv: Sequence[str]) -> int:
    """Print a table, or JSON.

    Raises:
      UserError: A config is missing.
    """
    parser = Parser('benchmark', __doc__)
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument('--forward-only', action='store_true', help='skip the training step')
    steps.add_argument('--train-only', action='store_true', help='skip the forward step')
    parser.add_argument(
        '--steps', type=positive_number, default=20, help='number of timed steps (default: 20)'
    )
    add_json_flag(parser, former_file=True)
    add_size_flags(parser)
    args, config = parse_config_args(parser, argv)
    if config is None:
        raise UserError('benchmark needs a config: benchmark CONFIG')
    if args.json not in (None, STDOUT):
        check_output(args.json, '--json')
    from vit_jax.inference import fine_tune
    from vit_jax.profiling import benchmark
    from vit_jax.profiling.batch_spec import batch_rows, row_of
    from vit_jax.runtime import console

    config = fine_tune.complete_config(config).config
    row = row_of(config, args.image_size, args.channels)
    config, spec, per_row = row
    run = to_run(config)
    ready = benchmark.prepare(run, rows := batch_rows(run))
    results = {}
    if not args.train_only:
        with console.status('compiling the forward step, and timing it'):
            results['forward'] = ready.forward(spec, per_row, args.steps)
    if not args.forward_only:
        with console.status('compiling the train step, and timing it'):
            results['train'] = ready.train(spec, per_row, args.steps)
    environment = benchmark.environment(ready.layout)
    if args.json:
        record = {
            'config': config.to_dict(),
            'example': {k: [list(s.shape), str(s.dtype)] for k, s in row.example.items()},
            **environment,
            **{name: dataclasses.asdict(timing) for name, timing in results.items()},
        }
        if write_json(record, args.json):
            return 0
    print_title(str(run.model.name), rows, row.example, environment)
    print_table(spec, results)
    return 0


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that replace a config's data."""
    add_square_flag(parser)
    parser.add_argument('--channels', type=int, help='channels of these images (default: 3)')


def print_title(
    model: str, rows: int, spec: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Print the model, the shapes and the devices."""
    shapes = ', '.join(f'{k} {list(s.shape)}' for k, s in spec.items() if s.shape)
    title = (
        f'{model}, {shapes}, batch {rows}, '
        f'{environment["num_devices"]} x {environment["device_kind"]} ({environment["layout"]})'
    )
    print(title)


def print_table(spec: Mapping[str, Any], results: Mapping[str, Timing]) -> None:
    """Print a row for each step."""
    from vit_jax.runtime.console import Console, Table

    # Measured batches do not contain padding.
    unit, per_example = (
        ('tokens/s', spec['target'].shape[0]) if 'target' in spec else ('images/s', 1)
    )
    headings = ('compile s', 'step ms', 'p10-p90', unit, 'TFLOP/s', 'MFU', 'memory GiB')
    table = Table('step', *headings, left=1)
    for name, t in results.items():
        table.add_row(
            name,
            f'{t.compile_sec:.1f}',
            f'{1e3 * t.step_sec:,.2f}',
            f'{1e3 * t.step_sec_p10:,.2f}-{1e3 * t.step_sec_p90:,.2f}',
            f'{per_example * t.images_per_sec:,.0f}',
            f'{t.flops_per_sec / 1e12:,.4g}',
            '-' if t.mfu is None else f'{t.mfu:.1%}',
            '-' if t.peak_bytes is None else f'{t.peak_bytes / 2**30:.2f}',
        )
    Console().print(table)
