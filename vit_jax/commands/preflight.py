"""Compile a config's step for absent TPUs or GPUs: does it fit, how long will it take?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from vit_jax.commands._parser import (
    FIT,
    Parser,
    add_allow_flag,
    add_json_flag,
    add_square_flag,
    batch_size_or_fit,
    check_picture,
    save_figure,
)
from vit_jax.config.load import parse_config_args, to_run
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.runtime import console

if TYPE_CHECKING:
    from vit_jax.profiling.topology import Topology

GIB = 2**30
COSTLIEST = 12


def main(argv: Sequence[str]) -> int:
    """Print tables or JSON; return 1 if the step does not fit into memory.

    Raises:
      UserError: A flag is out of range, or excluded by another.
    """
    args, config = parse_config_args(make_parser(), argv)
    if [config, args.sweep, args.workdir].count(None) != 2:
        raise UserError('preflight needs one of CONFIG, --sweep FILE[:ARG] and --workdir RUN')
    if args.price is not None and args.price < 0:
        raise UserError(f'--price {args.price:g}: must be 0 or more')
    if args.accum and _step_name(args) != 'train':
        raise UserError(
            '--accum applies to training steps: leave out --eval, --predict and --workdir'
        )
    if args.data_rate and (_step_name(args) != 'train' or args.sweep):
        raise UserError('--data-rate applies to the training step of --config')
    if not 0 < args.mfu <= 1:
        raise UserError(f'--mfu {args.mfu:g}: must be more than 0 and at most 1')
    if args.sweep and (args.accum or args.batch_size or args.out):
        raise UserError('--sweep cannot be combined with --accum, --batch-size and --out')
    if args.out:
        check_picture(args.out, '--out')
    return _run(args, config)


def make_parser() -> Parser:
    """Make the parser of the flags that do not belong to the config."""
    parser = Parser('preflight', __doc__)
    add = parser.add_argument
    add(
        '--topology',
        required=True,
        metavar='SLICE',
        help='TPU slice, such as v5e:4x4, v4:2x2x2, tpu7x:2x2x1 or v5litepod-16, 2xv5e:4x4 for '
        'two; or GPUs of a host: h100:8, a100-40, a100-80, l4, h200 or b200, 2xh100:8 for two '
        'hosts',
    )
    add('--workdir', metavar='DIR', help='run folder whose evaluation step is compiled')
    add_allow_flag(parser)
    step = parser.add_mutually_exclusive_group()
    step.add_argument('--eval', action='store_true', help='compile the evaluation step')
    step.add_argument('--predict', action='store_true', help='compile the prediction step')
    add(
        '--cycles',
        action='store_true',
        help="add the compiler's estimate, which takes minutes more",
    )
    add('--price', type=float, metavar='X', help='price of a chip-hour, in any currency')
    add(
        '--batch-size',
        type=batch_size_or_fit,
        metavar='N|fit',
        help="examples per batch; fit for the most that memory holds (default: the config's)",
    )
    add('--accum', choices=[FIT], help='try numbers of microbatches, and choose the fastest')
    add(
        '--remat',
        choices=[FIT],
        help='try each config.model.remat, with --batch-size fit at its largest batch, and choose '
        'the most examples per second',
    )
    add(
        '--sweep', metavar='FILE[:ARG]', help='sweep file, which is executed; every run is compiled'
    )
    add('--out', metavar='PATH', help='picture of the use of memory and time')
    add_json_flag(parser)
    add('--data-rate', action='store_true', help='show the images/s and cores that each host needs')
    add(
        '--mfu',
        type=float,
        default=0.4,
        help='model FLOPs utilization for --data-rate (default: 0.4)',
    )
    add('--examples', type=float, metavar='N', help="examples per epoch (default: the data's)")
    add_square_flag(parser)
    return parser


def check_fit(config: ConfigDict, slice_: str) -> int:
    """Print the tables for training by a config on a slice; return 1 if it does not fit."""
    return _run(make_parser().parse_args(['--topology', slice_]), config)


def _run(args: argparse.Namespace, config: ConfigDict | None) -> int:
    from vit_jax.profiling import topology

    slice_ = topology.parse_topology(args.topology)
    topology.require_compiler(slice_)
    if args.sweep:
        return _preflight_sweep(args, slice_)
    return _preflight_config(args, _run_config(args) if config is None else config, slice_)


def _run_config(args: argparse.Namespace) -> ConfigDict:
    """Read the config of a run, with the layout of `evaluate` and `predict`."""
    from vit_jax.inference import load

    config = load.read_config(args.workdir, args.allow)
    with config.unlocked():
        config.parallel = ConfigDict()
    return config


def _step_name(args: argparse.Namespace) -> str:
    """Name the step to compile, one of `ahead_of_time.STEPS`."""
    if args.predict:
        return 'predict'
    return 'eval' if args.eval or args.workdir else 'train'


def _options(args: argparse.Namespace) -> dict[str, Any]:
    from vit_jax.rehearsal import ahead_of_time

    return {
        'program': ahead_of_time.PROGRAM,
        'step': _step_name(args),
        'examples': args.examples,
        'image_size': args.image_size,
    }


def _preflight_config(args: argparse.Namespace, config: ConfigDict, slice_: Topology) -> int:
    from vit_jax.inference import fine_tune
    from vit_jax.profiling import pipeline, preflight, remat_search

    options, config = _options(args), fine_tune.complete_config(config).config
    if isinstance(args.batch_size, int):
        config = preflight.with_override(config, f'batch_size={args.batch_size}')
    per_core = _measure_per_core(config) if args.data_rate else 0.0
    measured, searched = None, {}
    if args.remat == FIT:
        searched = _try_remat(config, slice_, options, args.batch_size == FIT)
        config, measured = searched[remat_search.choose_remat(searched)]
    elif args.batch_size == FIT:
        with console.status('looking for the largest batch'):
            config, measured = preflight.largest_batch(config, slice_, **options)
    accumulated, advice = {}, ''
    if args.accum == FIT:
        accumulated = _try_microbatches(config, slice_, options)
        number, advice = preflight.choose_microbatches(accumulated)
        config, measured = preflight.with_microbatches(config, number), accumulated[number]
    if measured is None or args.cycles:
        with console.status(f'compiling for {slice_.name}'):
            measured = preflight.preflight(config, slice_, cycles=args.cycles, **options)
    reports, run = measured
    fits = all(report.fits for report in reports)
    remedies = {} if fits else _try_remedies(config, slice_, options)
    needs = pipeline.needs(run, slice_, args.mfu) if fits and per_core else []
    if args.json:
        record = _record(reports, run, remedies, args.price)
        if needs:
            record['data_rate'] = pipeline.needs_record(needs, per_core, slice_)
        if advice:
            record['accumulation'] = {n: _report_record(r[0]) for n, (r, _) in accumulated.items()}
            record['advice'] = advice
        if searched:
            record['remat'] = {name: _report_record(r[0]) for name, (_, (r, _)) in searched.items()}
        print(json.dumps(record, indent=2))
    else:
        if searched:
            print_remat(searched, remat_search.choose_remat(searched))
        if advice:
            print_accumulation(accumulated, advice)
        for report in reports:
            print_report(report)
        if fits and options['step'] == 'train':
            print_run(run, args.price)
        if needs:
            print_data_rate(needs, per_core, slice_)
        if remedies:
            print_remedies(
                remedies, preflight.keeps_all_activations(config) and options['step'] == 'train'
            )
    if args.out and fits:
        _save_picture(reports[0], args.out)
    if run.refusal and options['step'] == 'train':
        refused = f'train refuses the {run.steps:,} steps of this run: {run.refusal}'
        if args.batch_size != FIT:
            raise UserError(refused)
        print(f'note: with batch_size={to_run(config).batch_size}, {refused}', file=sys.stderr)
    return 0 if fits else EXIT_FAILED


def _measure_per_core(config: ConfigDict) -> float:
    """Measure the examples per second that a core of this machine prepares for the config."""
    from vit_jax.profiling import pipeline
    from vit_jax.runtime import sharding
    from vit_jax.trainer.evaluations import open_data

    layout = sharding.make_layout()
    with console.status('timing the data pipeline'):
        run = to_run(config)
        data = open_data(run.data, run.batch_size, layout, run.seed)
        return pipeline.per_core(data)


def _try_remat(
    config: ConfigDict, slice_: Topology, options: dict[str, Any], largest: bool
) -> dict[str, Any]:
    """Compile the step with each `model.remat`; return configs and reports by override."""
    from vit_jax.profiling import remat_search

    with console.status('compiling with each model.remat, a minute or more each'):
        return dict(remat_search.try_remat(config, slice_, largest=largest, **options))


def _try_microbatches(
    config: ConfigDict, slice_: Topology, options: dict[str, Any]
) -> dict[int, Any]:
    """Compile the step for several numbers of microbatches; return the reports by number."""
    from vit_jax.profiling import preflight

    with console.status('compiling several numbers of microbatches, a minute each'):
        return dict(preflight.try_microbatches(config, slice_, **options))


def _try_remedies(config: ConfigDict, slice_: Topology, options: dict[str, Any]) -> dict[str, Any]:
    """Compile changes that may make a step fit; return the reports by override."""
    from vit_jax.profiling import preflight

    reports = {}
    for override in preflight.remedies(config, slice_):
        with console.status(f'it does not fit: trying {override}'):
            try:
                changed = preflight.with_override(config, override)
                reports[override] = preflight.preflight(changed, slice_, **options)[0][0]
            except UserError:
                continue  # the task or model does not allow it
    return reports


def _record(reports: Sequence[Any], run: Any, remedies: dict[str, Any], price: float | None) -> Any:
    total = dataclasses.asdict(run) | {'hours': run.hours, 'chip_hours': run.chip_hours}
    if price is not None:
        total['cost'] = price * run.chip_hours
    return {
        'steps': [_report_record(report) for report in reports],
        'run': total,
        'remedies': {name: _report_record(report) for name, report in remedies.items()},
    }


def _report_record(report: Any) -> dict[str, Any]:
    return dataclasses.asdict(report) | mfu_rates(report)


def mfu_rates(report: Any) -> dict[str, Any]:
    """Compute MFU at the bound and by the compiler's estimate; empty if the step does not fit."""
    if not report.fits:
        return {}
    rates = {'mfu_bound': report.mfu(report.bound)}
    rates['examples_per_sec_bound'] = report.rows / report.bound if report.bound else None
    if report.estimate:
        rates['mfu_estimate'] = report.mfu(report.estimate)
    return rates


def _save_picture(report: Any, path: str) -> None:
    from vit_jax.profiling.preflight import ASYNC_COPIES
    from vit_jax.viz import charts

    seconds = {cost.path: cost.seconds for cost in report.costs}
    copies = seconds.pop(ASYNC_COPIES, 0.0)
    title = f'{describe(report)}, at least {1e3 * report.bound:.3g} ms'
    figure = charts.draw_chip_costs(title, report.memory, report.usable, seconds, copies)
    save_figure(figure, path, '--out')


def describe(report: Any) -> str:
    """Describe the step, the shapes of its batch and the topology in a phrase."""
    shapes = ', '.join(f'{k} {list(s)}' for k, s in report.shapes.items() if s)
    return f'{report.step} step, {shapes}, batch {report.rows:,} on {report.topology}'


def _preflight_sweep(args: argparse.Namespace, slice_: Topology) -> int:
    from vit_jax.profiling import preflight
    from vit_jax.sweeps import space

    sweep = space.load_sweep(args.sweep, 'preflight')
    rows, refusals = [], []
    for point in sweep.points:
        text = ', '.join(f'{k}={v}' for k, v in point.items())
        try:
            with console.status(f'compiling {text}'):
                config = space.config_of(sweep, point)
                result = preflight.preflight(config, slice_, cycles=args.cycles, **_options(args))
        except UserError as e:
            refusals.append(f'{text}: {e}')
            continue
        rows.append((text, *result))
        refusals += [f'{text}: {result[1].refusal}'] if result[1].refusal else []
    if not (rows or refusals):
        raise UserError(f'--sweep {args.sweep}: it does not list points; a search chooses them')
    if args.json:
        print(json.dumps([{'point': w} | _record(r, u, {}, args.price) for w, r, u in rows]))
    elif rows:
        print_sweep(rows, args.price)
    if refusals:
        raise UserError(f'{len(refusals)} of {len(sweep.points)} runs: {refusals[0]}')
    return 0 if all(r.fits for _, reports, _ in rows for r in reports) else EXIT_FAILED


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number."""
    return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def print_report(report: Any) -> None:
    """Print memory, time, collectives and the most expensive parts."""
    console = _console()
    console.print(f'{describe(report)}: {report.parameters:,} parameters')
    verdict = 'fits' if report.fits else 'does not fit'
    of = f'{number(report.needed / GIB)} of {number(report.usable / GIB)} GiB per {report.unit}'
    console.print(f'{verdict}: {of}', style=None if report.fits else 'bold')
    if report.rematerialized:
        console.print(
            f'XLA repeats {report.rematerialized:,} operations to save memory: the batch is at the '
            'limit of the memory'
        )
    console.print()
    _print_memory(console, report)
    if not report.fits:
        return
    _print_times(console, report)
    if report.exchanges:
        _print_exchanges(console, report)
    if report.crossing:
        _print_crossing(console, report.crossing, report.topology)
    _print_costs(console, report)


def _print_memory(console: Any, report: Any) -> None:
    table = _table(f'memory of a {report.unit}', 'GiB', 'share')
    for part, size in report.memory.items():
        table.add_row(part, number(size / GIB), f'{size / report.usable:.1%}')
    console.print(table, '')


def _print_times(console: Any, report: Any) -> None:
    table = _table('time of a step', 'ms', 'MFU')
    table.add_row('at least', number(1e3 * report.bound), f'{report.mfu(report.bound):.1%}')
    if report.estimate:
        estimate = number(1e3 * report.estimate), f'{report.mfu(report.estimate):.1%}'
        table.add_row("the compiler's estimate", *estimate)
    console.print(table)
    console.print(
        f'{number(report.flops / 1e12)} TFLOP and {number(report.bytes / 1e9)} GB from and to '
        f'memory per chip; collectives take at least {number(1e3 * report.link)} ms of the links; '
        f'compiled in {report.compile_seconds:.0f} s'
    )
    if report.step != 'train' and report.bound:
        console.print(f'at most {number(report.rows / report.bound)} examples/s')
    if report.estimate:
        console.print(
            'the estimate makes memory-bound parts 2.5 to 4 times slower than their bytes: use it '
            'to compare programs, not to predict times'
        )
    console.print()


def _print_exchanges(console: Any, report: Any) -> None:
    table = _table('collectives', 'axis', 'asynchronous', 'per step', 'MB')
    for row in report.exchanges:
        how = 'yes' if row.asynchronous else 'no'
        table.add_row(row.kind, row.axis, how, f'{row.count:,}', number(row.bytes / 1e6))
    console.print(table, '')


def _print_crossing(console: Any, crossing: Any, name: str) -> None:
    from vit_jax.profiling import topology

    part = topology.parse_topology(name).part
    console.print(
        f'between {part}s each host sends and receives {number(crossing.host_bytes / 1e6)} MB per '
        f'step, in {crossing.count:,} arrays of each chip; the bound above does not include this'
    )
    several = f'the second {part}' if crossing.slices == 2 else f'{crossing.slices} {part}s'
    headings = 'ms', 'hidden ms', 'step at least ms', f'times one {part}', 'pays from batch'
    table = _table('network of a host', *headings)
    for speed in crossing.speeds:
        for how, over in (('as scheduled', speed.scheduled), ('at best', speed.best)):
            table.add_row(
                f'{speed.gbits} Gb/s, {how}',
                *map(number, (1e3 * speed.seconds, 1e3 * over.hidden, 1e3 * over.step)),
                f'{over.speedup:.2f}',
                f'{over.pays_from:,}',
            )
    console.print(table)
    console.print(
        f'at best, each array is sent as soon as the backward pass has computed it; {several} '
        f'{"pays" if crossing.slices == 2 else "pay"} where the step takes less time than on one '
        f'{part}\n'
    )


def _print_costs(console: Any, report: Any) -> None:
    table = _table('costliest', 'at least ms', 'GFLOP', 'MB')
    for cost in costliest(report.costs):
        numbers = 1e3 * cost.seconds, cost.flops / 1e9, cost.bytes / 1e6
        table.add_row(cost.path, *map(number, numbers))
    console.print(table, '')


def costliest(costs: Sequence[Any]) -> list[Any]:
    """Select the most expensive parts, followed by asynchronous copies."""
    from vit_jax.profiling.preflight import ASYNC_COPIES

    costs_with_time = [cost for cost in costs if cost.seconds and cost.path != ASYNC_COPIES]
    return costs_with_time[:COSTLIEST] + [cost for cost in costs if cost.path == ASYNC_COPIES]


def print_run(run: Any, price: float | None) -> None:
    """Print the least time and cost of the whole run."""
    money = '' if price is None else f', {price * run.chip_hours:,.2f} at {price:g} per chip-hour'
    chips = 'one chip' if run.chips == 1 else f'{run.chips} chips'
    _console().print(
        f'the run: {run.steps:,} steps, at least {number(run.hours)} hours on {chips}, '
        f'{number(run.chip_hours)} chip-hours{money}, without evaluations'
    )


def print_data_rate(needs: Sequence[Any], per_core: float, slice_: Any) -> None:
    """Print the examples per second that each host must deliver, and the cores needed."""
    console = _console()
    console.print()
    table = _table('data for a host', 'ms per step', 'examples/s', 'cores like those here')
    for need in needs:
        cells = (
            number(1e3 * need.seconds),
            number(need.per_host),
            f'{need.cores(per_core):,}',
        )
        table.add_row(f'{need.name}, MFU {need.mfu:.0%}', *cells)
    console.print(table)
    hosts = 'one host' if slice_.hosts == 1 else f'{slice_.hosts} hosts'
    console.print(
        f'{slice_.name} is {hosts} of {slice_.chips // slice_.hosts} chips; a core of this machine '
        f'delivers {number(per_core)} examples/s of this config (see `data`)'
    )


def print_remedies(remedies: Mapping[str, Any], stacks_all: bool = False) -> None:
    """Print the compiled remedies; `stacks_all` if scanned blocks keep all activations."""
    if stacks_all:
        _console().print(
            'model.scan=True without model.remat keeps all activations of the blocks until the '
            'backward pass; the step with each of these changes:\n'
        )
    table = _table('with', _memory_heading(remedies.values()), 'fits', 'at least ms', 'MFU')
    for override, report in remedies.items():
        times = ['-', '-']
        if report.fits:
            times = [number(1e3 * report.bound), f'{report.mfu(report.bound):.1%}']
        fits = 'yes' if report.fits else 'no'
        table.add_row(f'--config.{override}', number(report.needed / GIB), fits, *times)
    _console().print(table)
    if not any(report.fits for report in remedies.values()):
        _console().print(
            '\nnone of these is enough: combine several, use more chips, '
            'or try --batch-size fit or --accum fit'
        )


def print_accumulation(remedies: Mapping[int, tuple[Sequence[Any], Any]], advice: str) -> None:
    """Print a row for each number of microbatches, and the advice."""
    from vit_jax.profiling.preflight import TEMPORARIES

    memory = _memory_heading(reports[0] for reports, _ in remedies.values())
    table = _table('microbatches', 'examples', memory, 'temporaries', 'at least ms', 'MFU')
    for microbatches, (reports, run) in remedies.items():
        first = reports[0]
        examples = f'{first.rows // first.chips // microbatches:,}'
        cells = [examples, number(first.needed / GIB), 'does not fit', '', '']
        if all(report.fits for report in reports):
            temporary = number(first.memory.get(TEMPORARIES, 0) / GIB)
            cells[2:] = temporary, number(1e3 * run.seconds), f'{first.mfu(run.seconds):.1%}'
        table.add_row(str(microbatches), *cells)
    console = _console()
    console.print(table)
    console.print(f'{advice}\n')


def print_remat(tried: Mapping[str, Any], chosen: str) -> None:
    """Print a row for each value of `model.remat`, and the choice."""
    memory = _memory_heading(reports[0] for _, (reports, _) in tried.values())
    table = _table('recomputation', 'batch', memory, 'at least ms', 'examples/s')
    for override, (_, (reports, run)) in tried.items():
        first = reports[0]
        cells = ['does not fit', '']
        if all(report.fits for report in reports):
            cells = [number(1e3 * run.seconds), number(run.rows / run.seconds)]
        table.add_row(override, f'{first.rows:,}', number(first.needed / GIB), *cells)
    console = _console()
    console.print(table)
    console.print(f'{chosen} has the most examples per second\n')


def _memory_heading(reports: Iterable[Any]) -> str:
    return f'GiB per {next((report.unit for report in reports), "chip")}'


def print_sweep(rows: Sequence[tuple[str, Sequence[Any], Any]], price: float | None) -> None:
    """Print a row for each point of a sweep, and the total."""
    money = [] if price is None else ['cost']
    memory = _memory_heading(reports[0] for _, reports, _ in rows)
    headings = memory, 'at least ms', 'MFU', 'steps', 'chip-hours'
    table = _table('run', 'fits', *headings, *money)
    total = 0.0
    for text, reports, run in rows:
        first, fits = reports[0], all(r.fits for r in reports)
        cells = [number(first.needed / GIB), '-', '-', f'{run.steps:,}', '-', *money]
        if fits:
            total += run.chip_hours
            cells = [cells[0], number(1e3 * run.seconds), f'{first.mfu(first.bound):.1%}']
            cells += [f'{run.steps:,}', number(run.chip_hours)]
            cells += [] if price is None else [f'{price * run.chip_hours:,.2f}']
        table.add_row(text, 'yes' if fits else 'no', *cells)
    cost = [] if price is None else [f'{price * total:,.2f}']
    table.add_row('total of those that fit', *[''] * 5, number(total), *cost)
    _console().print(table)


def _console() -> Any:
    from vit_jax.runtime.console import Console

    return Console(soft_wrap=True)


def _table(*headings: str) -> Any:
    from vit_jax.runtime.console import Table

    return Table(*headings, left=1, no_wrap=True)
