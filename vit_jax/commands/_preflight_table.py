"""Tables of `preflight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
COSTLIEST = 12


def describe(report: Any) -> str:
    """The step, the shapes of its batch, and the topology, in a phrase."""
    shapes = ', '.join(f'{k} {"x".join(map(str, s))}' for k, s in report.shapes.items() if s)
    return f'{report.step} step, {shapes}, batch {report.rows:,} on {report.topology}'


def rates(report: Any) -> dict[str, Any]:
    """MFU at the bound and at the compiler's estimate; empty for a step that does not fit."""
    if not report.fits:
        return {}
    found = {'mfu_bound': report.mfu(report.bound)}
    found['examples_per_sec_bound'] = report.rows / report.bound if report.bound else None
    if report.estimate:
        found['mfu_estimate'] = report.mfu(report.estimate)
    return found


def number(value: float) -> str:
    """A number with three significant digits, or as a whole number."""
    return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def print_report(report: Any) -> None:
    """Print memory, time, collectives and the most expensive parts."""
    console = _console()
    console.print(f'{describe(report)}: {report.parameters:,} parameters')
    verdict = 'fits' if report.fits else 'does not fit'
    of = f'{number(report.needed / GIB)} of {number(report.usable / GIB)} GiB a chip'
    console.print(f'{verdict}: {of}\n', style=None if report.fits else 'bold')
    _print_memory(console, report)
    if not report.fits:
        return
    _print_times(console, report)
    if report.exchanges:
        _print_exchanges(console, report)
    if report.crossing:
        _print_crossing(console, report.crossing)
    _print_costs(console, report)


def _print_memory(console: Any, report: Any) -> None:
    table = _table('memory of a chip', 'GiB', 'of all')
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
        f'memory a chip; exchanges take at least {number(1e3 * report.link)} ms of the links; '
        f'compiled in {report.compile_seconds:.0f} s'
    )
    if report.step != 'train' and report.bound:
        console.print(f'at most {number(report.rows / report.bound)} examples/s')
    if report.estimate:
        console.print(
            'the estimate takes what is bound by memory for 2.5 to 4 times slower than its bytes: '
            'compare two programs by it, and expect no such time'
        )
    console.print()


def _print_exchanges(console: Any, report: Any) -> None:
    table = _table('collectives', 'axis', 'asynchronous', 'a step', 'MB')
    for row in report.exchanges:
        how = 'yes' if row.asynchronous else 'no'
        table.add_row(row.kind, row.axis, how, f'{row.count:,}', number(row.bytes / 1e6))
    console.print(table, '')


def _print_crossing(console: Any, crossing: Any) -> None:
    console.print(
        f'between slices each host sends and receives {number(crossing.host_bytes / 1e6)} MB a '
        f'step, as {crossing.count:,} arrays of each chip; the bound above leaves this out'
    )
    several = 'the second slice' if crossing.slices == 2 else f'{crossing.slices} slices'
    headings = 'ms', 'hidden ms', 'step at least ms', 'times one slice', 'pays from batch'
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
        'slice\n'
    )


def _print_costs(console: Any, report: Any) -> None:
    table = _table('costliest', 'at least ms', 'GFLOP', 'MB')
    for cost in costliest(report.costs):
        numbers = (
            number(1e3 * cost.seconds),
            number(cost.flops / 1e9),
            number(cost.bytes / 1e6),
        )
        table.add_row(cost.path, *numbers)
    console.print(table, '')


def costliest(costs: Sequence[Any]) -> list[Any]:
    """The most expensive parts, followed by asynchronous copies."""
    from vit_jax.profiling.preflight import MEANWHILE

    alone = [cost for cost in costs if cost.seconds and cost.path != MEANWHILE]
    return alone[:COSTLIEST] + [cost for cost in costs if cost.path == MEANWHILE]


def print_run(run: Any, price: float | None) -> None:
    """Print time and cost of the whole run, at its bound."""
    money = '' if price is None else f', {price * run.chip_hours:,.2f} at {price:g} a chip-hour'
    chips = 'one chip' if run.chips == 1 else f'{run.chips} chips'
    _console().print(
        f'the run: {run.steps:,} steps, at least {number(run.hours)} hours on {chips}, '
        f'{number(run.chip_hours)} chip-hours{money}; evaluations are not in it'
    )


def print_data_rate(needs: Sequence[Any], per_core: float, slice_: Any) -> None:
    """Print the examples that each host must deliver, and the cores that takes."""
    console = _console()
    console.print()
    table = _table('data for a host', 'ms a step', 'examples/s', 'cores like those here')
    for need in needs:
        cells = number(1e3 * need.seconds), number(need.per_host), f'{need.cores(per_core):,}'
        table.add_row(f'{need.name}, MFU {need.mfu:.0%}', *cells)
    console.print(table)
    hosts = 'one host' if slice_.hosts == 1 else f'{slice_.hosts} hosts'
    console.print(
        f'{slice_.name} is {hosts} of {slice_.chips // slice_.hosts} chips; a core of this machine '
        f'delivers {number(per_core)} examples/s of this config (see `data --bench`)'
    )


def print_remedies(tried: Mapping[str, Any], stacks_all: bool = False) -> None:
    """Print the compiled remedies; `stacks_all` if scanned blocks recompute nothing."""
    if stacks_all:
        _console().print(
            'model.scan=True without model.remat keeps all activations of the blocks in one stack '
            'until the backward pass; the step with each of these changes:\n'
        )
    table = _table('with', 'GiB a chip', 'fits', 'at least ms', 'MFU')
    for override, report in tried.items():
        found = ['-', '-']
        if report.fits:
            found = [number(1e3 * report.bound), f'{report.mfu(report.bound):.1%}']
        fits = 'yes' if report.fits else 'no'
        table.add_row(f'--config.{override}', number(report.needed / GIB), fits, *found)
    _console().print(table)
    if not any(report.fits for report in tried.values()):
        _console().print(
            '\nnone of these is enough by itself: take several, more chips, '
            'or what --batch-size fit or --accum fit finds'
        )


def print_accumulation(tried: Mapping[int, tuple[Sequence[Any], Any]], advice: str) -> None:
    """Print a line for every number of microbatches, and the advice."""
    from vit_jax.profiling.memory_report import TEMPORARIES

    table = _table('microbatches', 'examples', 'GiB a chip', 'temporaries', 'at least ms', 'MFU')
    for number_of, (reports, run) in tried.items():
        first = reports[0]
        examples = f'{first.rows // first.chips // number_of:,}'
        cells = [examples, number(first.needed / GIB), 'does not fit', '', '']
        if all(report.fits for report in reports):
            held = number(first.memory.get(TEMPORARIES, 0) / GIB)
            cells[2:] = held, number(1e3 * run.seconds), f'{first.mfu(run.seconds):.1%}'
        table.add_row(str(number_of), *cells)
    console = _console()
    console.print(table)
    console.print(f'{advice}\n')


def print_sweep(rows: Sequence[tuple[str, Sequence[Any], Any]], price: float | None) -> None:
    """Print a line for every point of a sweep, and the sum."""
    money = [] if price is None else ['cost']
    table = _table('run', 'fits', 'GiB a chip', 'at least ms', 'MFU', 'steps', 'chip-hours', *money)
    total = 0.0
    for words, reports, run in rows:
        first, fits = reports[0], all(r.fits for r in reports)
        cells = [number(first.needed / GIB), '-', '-', f'{run.steps:,}', '-', *money]
        if fits:
            total += run.chip_hours
            cells = [cells[0], number(1e3 * run.seconds), f'{first.mfu(first.bound):.1%}']
            cells += [f'{run.steps:,}', number(run.chip_hours)]
            cells += [] if price is None else [f'{price * run.chip_hours:,.2f}']
        table.add_row(words, 'yes' if fits else 'no', *cells)
    cost = [] if price is None else [f'{price * total:,.2f}']
    table.add_row('sum of those that fit', *[''] * 5, number(total), *cost)
    _console().print(table)


def _console() -> Any:
    from vit_jax.runtime.console import Console

    return Console(soft_wrap=True)


def _table(*headings: str) -> Any:
    from vit_jax.runtime.console import Table

    return Table(*headings, left=1, no_wrap=True)
