"""Compile a config's step for a TPU slice without a TPU: does it fit, what will it take?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from vit_jax.commands import _preflight_table as table
from vit_jax.commands._parser import FIT, Parser, add_allow_flag, batch_size
from vit_jax.commands._pictures import check_picture, save_figure
from vit_jax.config import load as config_lib
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.runtime import console

if TYPE_CHECKING:
    from vit_jax.profiling.topology import Topology


def main(argv: Sequence[str]) -> int:
    """Prints tables or JSON; 1 if the step does not fit into memory."""
    args, config = config_lib.parse_config_args(make_parser(), argv)
    if [config, args.sweep, args.workdir].count(None) != 2:
        raise UserError(
            'preflight needs one of --config FILE[:ARG], --sweep FILE[:ARG] and --workdir DIR'
        )
    if args.price is not None and args.price < 0:
        raise UserError(f'--price {args.price:g}: must be 0 or more')
    if args.accum and _step(args) != 'train':
        raise UserError(
            '--accum applies to training steps: leave out --eval, --predict and --workdir'
        )
    if args.data_rate and (_step(args) != 'train' or args.sweep):
        raise UserError('--data-rate applies to the training step of --config')
    if not 0 < args.mfu <= 1:
        raise UserError(f'--mfu {args.mfu:g}: must be more than 0 and at most 1')
    if args.sweep and (args.accum or args.batch_size or args.out):
        raise UserError('--sweep compiles its own runs: leave out --accum, --batch-size and --out')
    if args.out:
        check_picture(args.out, '--out')
    return _run(args, config)


def check(config: ConfigDict, slice_: str) -> int:
    """Check whether training by a config fits on a slice; prints and returns as the command."""
    return _run(make_parser().parse_args(['--topology', slice_]), config)


def _run(args: argparse.Namespace, config: ConfigDict | None) -> int:
    from vit_jax.profiling import topology

    slice_ = topology.parse(args.topology)
    topology.require_compiler()
    if args.sweep:
        return _sweep(args, slice_)
    return _config(args, _of_run(args) if config is None else config, slice_)


def _of_run(args: argparse.Namespace) -> ConfigDict:
    """The config of a run, with the layout of `evaluate` and `predict`."""
    from vit_jax.inference import load

    config = load.read_config(args.workdir, args.allow)
    with config.unlocked():
        config.parallel = ConfigDict()
    return config


def _step(args: argparse.Namespace) -> str:
    """The step that is compiled, of `trainer.ahead_of_time.STEPS`."""
    if args.predict:
        return 'predict'
    return 'eval' if args.eval or args.workdir else 'train'


def make_parser() -> Parser:
    """The flags beside those of the config."""
    parser = Parser('preflight', __doc__)
    add = parser.add_argument
    add(
        '--topology',
        required=True,
        metavar='SLICE',
        help='as v5e:4x4, v4:2x2x2, v5litepod-16, or two: 2xv5e:4x4',
    )
    add('--workdir', metavar='DIR', help='a run folder, whose evaluation step is compiled')
    add_allow_flag(parser)
    step = parser.add_mutually_exclusive_group()
    for name, what in (('eval', 'evaluation'), ('predict', 'prediction')):
        step.add_argument(f'--{name}', action='store_true', help=f'the step of {what} instead')
    add('--cycles', action='store_true', help="wait minutes for the compiler's own estimate")
    add('--price', type=float, metavar='X', help='of a chip-hour, in any currency')
    add(
        '--batch-size',
        type=batch_size,
        metavar='N|fit',
        help="instead of the config's; fit to find the largest that fits",
    )
    add('--accum', choices=[FIT], help='try numbers of microbatches, and take one if it pays')
    add('--sweep', metavar='FILE[:ARG]', help='every run of a sweep; it is executed')
    add('--out', metavar='PATH', help='a picture of where memory and time go')
    add('--json', action='store_true', help='print all numbers as JSON instead of tables')
    add('--data-rate', action='store_true', help='images/s and CPU cores that each host needs')
    add('--mfu', type=float, default=0.4, help='that training reaches, for --data-rate: 0.4')
    add('--examples', type=float, metavar='N', help="of an epoch, without the config's data")
    add('--image-size', type=int, metavar='PIXELS', help='square images, likewise')
    return parser


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from vit_jax.trainer import ahead_of_time

    return {
        'program': ahead_of_time.PROGRAM,
        'step': _step(args),
        'examples': args.examples,
        'image_size': args.image_size,
    }


def _config(args: argparse.Namespace, config: ConfigDict, slice_: Topology) -> int:
    from vit_jax.inference import fine_tune
    from vit_jax.profiling import accumulation, data_rate, preflight

    options, config = _options(args), fine_tune.filled(config).config
    if isinstance(args.batch_size, int):
        config = preflight.apply(config, f'batch_size={args.batch_size}')
    per_core = _per_core(config) if args.data_rate else 0.0
    measured = None
    if args.batch_size == FIT:
        with console.status('looking for the largest batch'):
            config, measured = preflight.largest_batch(config, slice_, **options)
    accumulated, advice = {}, ''
    if args.accum == FIT:
        accumulated = _accumulated(config, slice_, options)
        number, advice = accumulation.choose(accumulated)
        config, measured = accumulation.with_steps(config, number), accumulated[number]
    if measured is None or args.cycles:
        with console.status(f'compiling for {slice_.name}'):
            measured = preflight.preflight(config, slice_, cycles=args.cycles, **options)
    reports, run = measured
    fits = all(report.fits for report in reports)
    tried = {} if fits else _remedies(config, slice_, options)
    needs = data_rate.needs(run, slice_, args.mfu) if fits and per_core else []
    if args.json:
        record = _record(reports, run, tried, args.price)
        if needs:
            record['data_rate'] = data_rate.record(needs, per_core, slice_)
        if advice:
            record['accumulation'] = {n: _each(r[0]) for n, (r, _) in accumulated.items()}
            record['advice'] = advice
        print(json.dumps(record, indent=2))
    else:
        if advice:
            table.print_accumulation(accumulated, advice)
        for report in reports:
            table.print_report(report)
        if fits and options['step'] == 'train':
            table.print_run(run, args.price)
        if needs:
            table.print_data_rate(needs, per_core, slice_)
        if tried:
            table.print_remedies(tried, preflight.stacks_all(config) and options['step'] == 'train')
    if args.out and fits:
        _draw(reports[0], args.out)
    if run.refusal and options['step'] == 'train':
        refused = f'train refuses the {run.steps:,} steps of this run: {run.refusal}'
        if args.batch_size != FIT:
            raise UserError(refused)
        print(f'note: with batch_size={config.batch_size}, {refused}', file=sys.stderr)
    return 0 if fits else EXIT_FAILED


def _per_core(config: ConfigDict) -> float:
    """Examples a second that a core of this machine prepares for the config."""
    from vit_jax.profiling import data_rate
    from vit_jax.runtime import sharding
    from vit_jax.trainer.evaluate import open_data

    layout = sharding.make_layout()
    with console.status('timing the data pipeline'):
        data = open_data(config.data, config.batch_size, layout, seed=config.seed)
        return data_rate.per_core(data, layout.put_batch)


def _accumulated(config: ConfigDict, slice_: Topology, options: dict[str, Any]) -> dict[int, Any]:
    """The reports of the step by the number of its microbatches."""
    from vit_jax.profiling import accumulation

    with console.status('compiling numbers of microbatches, a minute each'):
        return dict(accumulation.trials(config, slice_, **options))


def _remedies(config: ConfigDict, slice_: Topology, options: dict[str, Any]) -> dict[str, Any]:
    """The reports of the remedies for a step that does not fit, by override."""
    from vit_jax.profiling import preflight

    found = {}
    for override in preflight.remedies(config, slice_):
        with console.status(f'it does not fit: trying {override}'):
            try:
                changed = preflight.apply(config, override)
                found[override] = preflight.preflight(changed, slice_, **options)[0][0]
            except UserError:
                continue  # not with this task or model
    return found


def _record(reports: Sequence[Any], run: Any, tried: dict[str, Any], price: float | None) -> Any:
    whole = dataclasses.asdict(run) | {'hours': run.hours, 'chip_hours': run.chip_hours}
    if price is not None:
        whole['cost'] = price * run.chip_hours
    return {
        'steps': [_each(report) for report in reports],
        'run': whole,
        'remedies': {name: _each(report) for name, report in tried.items()},
    }


def _each(report: Any) -> dict[str, Any]:
    return dataclasses.asdict(report) | table.rates(report)


def _draw(report: Any, path: str) -> None:
    from vit_jax.profiling.preflight import MEANWHILE
    from vit_jax.viz import chip_costs

    seconds = {cost.path: cost.seconds for cost in report.costs}
    beside = seconds.pop(MEANWHILE, 0.0)
    title = f'{table.describe(report)}, at least {1e3 * report.bound:.3g} ms'
    figure = chip_costs.draw(title, report.memory, report.usable, seconds, beside)
    save_figure(figure, path, '--out')


def _sweep(args: argparse.Namespace, slice_: Topology) -> int:
    from vit_jax.profiling import preflight
    from vit_jax.sweeps import price, space

    sweep = space.load(args.sweep, 'preflight')
    rows, refusals = [], []
    for point in sweep.points:
        words = ', '.join(f'{k}={v}' for k, v in point.items())
        try:
            with console.status(f'compiling {words}'):
                config = price.config_of(sweep, point)
                found = preflight.preflight(config, slice_, cycles=args.cycles, **_options(args))
        except UserError as e:
            refusals.append(f'{words}: {e}')
            continue
        rows.append((words, *found))
        refusals += [f'{words}: {found[1].refusal}'] if found[1].refusal else []
    if not (rows or refusals):
        raise UserError(f'--sweep {args.sweep}: it has no points of its own, a search chooses them')
    if args.json:
        print(json.dumps([{'point': w} | _record(r, u, {}, args.price) for w, r, u in rows]))
    elif rows:
        table.print_sweep(rows, args.price)
    if refusals:
        raise UserError(f'{len(refusals)} of {len(sweep.points)} runs: {refusals[0]}')
    return 0 if all(r.fits for _, reports, _ in rows for r in reports) else EXIT_FAILED
