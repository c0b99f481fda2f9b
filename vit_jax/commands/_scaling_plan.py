"""Subcommand `scaling plan`: price runs, and compare designs by the error of their law."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import DEVICE_HELP, MFU_HELP, Parser, add_square_flag, align
from vit_jax.commands._scaling_laws import require_count, require_positive
from vit_jax.commands._scaling_tuned import add_tuned_flag, read_law, tuned_lines
from vit_jax.config.load import parse_config_args
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.profiling.cost import PlannedRun
    from vit_jax.scaling.isoflop_design import StudyDesign
    from vit_jax.sweeps.isoflop import Isoflop
    from vit_jax.sweeps.space import Family, Sweep

COMMAND = 'scaling plan'


def plan(argv: Sequence[str]) -> int:
    """Price a sweep or a config before anything runs: parameters, FLOPs, chip-hours."""
    parser = Parser(COMMAND, plan.__doc__)
    add_plan_flags(parser)
    add = parser.add_argument
    add('--seeds', type=int, default=0, metavar='N', help='seeds per run, compared with more runs')
    add(
        '--target',
        type=float,
        metavar='FLOPS',
        help='FLOPs of the run to predict (default: 4 x the largest run)',
    )
    noise = 'standard deviation of log y between seeds (default: %(default)s)'
    add('--noise', type=float, default=0.02, help=noise)
    precision = 'standard error of the prediction to price (ln N* of an isoFLOP study, else ln y)'
    add('--precision', type=float, metavar='P', help=precision)
    best = 'estimated optimum of an isoFLOP study (default: the middle of its sizes)'
    add('--optimum', metavar='N@C', help=best)
    add_tuned_flag(parser)
    args, config = parse_config_args(parser, argv, positional=False)
    from vit_jax.profiling.cost import CORE, Machine, cost_table

    _check_plan_flags(args)
    machine = Machine(args.device, args.mfu)
    law = read_law(args.tuned) if args.tuned else None
    planned = None if config is not None else _load(args)
    runs = price_runs(args, config, planned)
    print(align(cost_table(runs, machine), left=0))
    searched = (
        '; an upper bound for what a search chooses' if any(r.count > 1 for r in runs) else ''
    )
    if any(r.tokens for r in runs):
        print('tokens: of the target without padding; FLOPs include padding')
    print(
        f'GFLOPs: forward, one example; exaFLOPs: training{searched}\n'
        f'chip-hours of {args.device}, core-days of {CORE}, at {args.mfu:.0%} of the peak'
    )
    if line := _describe_repeated_cost(runs):
        print(line)
    if line := _describe_repeats(runs):
        print(line)
    if law:
        print('\n'.join(tuned_lines(law, [(run, _examples_seen(run)) for run in runs])))
    if args.seeds or args.precision:
        _print_designs(runs, planned, args)
    return 0


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the runs, replacements of their data, and the device."""
    add = parser.add_argument
    add('file', nargs='?', metavar='FILE[:ARG]', help='sweep file, which is executed')
    add('--examples', type=float, metavar='N', help="examples per epoch (default: the data's)")
    add_square_flag(parser)
    add('--device', default='TPU v3', metavar='KIND', help=DEVICE_HELP)
    add('--mfu', type=float, default=0.4, help=MFU_HELP)


def _check_plan_flags(args: argparse.Namespace) -> None:
    require_count(args.seeds, '--seeds')
    require_positive(args.target, '--target')
    require_positive(args.precision, '--precision')
    if args.examples is not None and args.examples < 1:
        raise UserError(f'--examples {args.examples:g}: must be at least 1')
    _parse_optimum(args.optimum)
    if not 0 < args.noise < 1:
        raise UserError(f'--noise {args.noise:g}: must be more than 0 and less than 1')


def _load(args: argparse.Namespace) -> Sweep | Family:
    """Load the study of the file; raise UserError without one, or for a mistake in it."""
    from vit_jax.sweeps import space

    if args.file is None:
        raise UserError(f'{COMMAND} needs one of FILE[:ARG] (a sweep) and --config FILE[:ARG]')
    return space.load_study(args.file, COMMAND)


def price_runs(
    args: argparse.Namespace, config: Any | None, planned: Sweep | Family | None
) -> list[PlannedRun]:
    """Price the runs of a config, or of the file's study.

    Raises:
      UserError: Both are given, one has a mistake, or data are missing.
    """
    if config is not None and args.file is not None:
        raise UserError(f'{COMMAND} needs one of FILE[:ARG] (a sweep) and --config FILE[:ARG]')
    from vit_jax.inference import fine_tune
    from vit_jax.profiling.cost import price
    from vit_jax.sweeps.space import Sweep, planned_runs

    if planned is None:
        return [price(fine_tune.complete_config(config).config, args.examples, args.image_size)]
    sweep = planned if isinstance(planned, Sweep) else planned.sweep()
    return planned_runs(sweep, args.examples, args.image_size)


def _describe_repeated_cost(runs: Sequence[PlannedRun]) -> str:
    """Describe the cost of runs that repeat another with a new seed; empty without any."""
    settings: set[str] = set()
    repeated = []
    for run in runs:
        setting = str({name: value for name, value in run.point.items() if name != 'seed'})
        if 'seed' in run.point and setting in settings:
            repeated.append(run.flops)
        settings.add(setting)
    share = sum(repeated) / sum(run.flops for run in runs)
    line = (
        f'{len(repeated)} of {len(runs)} runs repeat another with a new seed: {share:.0%} of FLOPs'
    )
    return line if repeated else ''


def _describe_repeats(runs: Sequence[PlannedRun]) -> str:
    """Describe runs that see their data too often; empty without any."""
    from vit_jax.scaling.repeats import EPOCHS
    from vit_jax.sweeps import asha

    runs = [run for run in runs if run.point.get(asha.FROM) != '']  # without trunks
    sized = [run for run in runs if run.data_size]
    epochs = [_examples_seen(run) / run.data_size for run in sized]
    many = sum(run.count for run, n in zip(sized, epochs, strict=True) if n > EPOCHS)
    if not many:
        return ''
    return (
        f'{many} of {sum(run.count for run in runs)} runs repeat their data more than '
        f'{EPOCHS:g} times, up to {max(epochs):,.3g}: repeats are worth less than new data '
        '(Muennighoff et al. 2023); vary the unique data to let `scaling optimal` measure this'
    )


def _examples_seen(run: PlannedRun) -> float:
    """Count the examples of a run, including its trunk's up to the branch."""
    from vit_jax.sweeps import asha

    return (run.steps + int(run.point.get(asha.STEP) or 0)) * run.batch_size


def _print_designs(
    runs: Sequence[PlannedRun], planned: Sweep | Family | None, args: argparse.Namespace
) -> None:
    """Print the expected errors of designs: of N* for a study at equal compute, else of y."""
    from vit_jax.sweeps.isoflop import Isoflop

    if isinstance(planned, Isoflop):
        _print_study_designs(planned, args)
    else:
        _print_curve_designs(runs, args)


def _print_curve_designs(runs: Sequence[PlannedRun], args: argparse.Namespace) -> None:
    """Print the cost of seeds, and how much seeds and other runs of equal cost improve a law."""
    from vit_jax.scaling import coverage

    flops = [run.flops / run.count for run in runs for _ in range(run.count)]
    target = args.target or 4 * max(flops)
    seeds = max(args.seeds, 1)
    designs = coverage.designs(flops, seeds, target)
    if not designs or any(run.count > 1 for run in runs):
        total = seeds * sum(flops) / 1e18
        print(
            f'{seeds} seeds of each: {total:.4g} exaFLOPs; to estimate their use for a law, '
            f'plan at least {coverage.MIN_SIZES} runs that differ in FLOPs'
        )
        return
    table = [['design', 'runs', 'exaFLOPs', *(f'error, {law}' for law in coverage.DESIGN_LAWS)]]
    for design in designs:
        errors = [f'{100 * args.noise * error:.2g} %' for error in design.errors.values()]
        table.append([design.name, f'{design.runs}', f'{design.cost / 1e18:.4g}', *errors])
    print(align(table, left=1))
    if args.precision:
        planned = designs[0]
        for law, error in planned.errors.items():
            _print_price(law, args.noise * error, planned.runs, planned.cost, args.precision)
    print(
        f'error: expected for y at {target:.3g} FLOPs, predicted by such a law of y over FLOPs '
        f'with b = {coverage.DESIGN_EXPONENT}, if\nruns scatter by {100 * args.noise:.2g} %; '
        'c is half of y at the largest run. If the law bends, the error grows\nwith the distance '
        'of the target'
    )


def _print_price(name: str, error: float, runs: int, cost: float, precision: float) -> None:
    """Print how many seeds of each run bring a standard error down to a precision."""
    from vit_jax.scaling.isoflop_design import seeds_for

    seeds = seeds_for(error, precision)
    print(
        f'--precision {precision:g}, {name}: {seeds} seed(s) of each run, {seeds * runs:,} runs, '
        f'{seeds * cost / 1e18:.4g} exaFLOPs'
    )


def _print_study_designs(family: Isoflop, args: argparse.Namespace) -> None:
    """Print the expected errors of N* of a study, with seeds, and with sizes that follow C."""
    from vit_jax.scaling import isoflop_design
    from vit_jax.sweeps import isoflop

    runs = isoflop.runs(family)
    planned = isoflop_design.from_runs(
        'as planned', [run.plan.parameters for run in runs], [run.budget for run in runs]
    )
    best = _parse_optimum(args.optimum) or family.optimum or isoflop_design.middle(planned)
    target = args.target or 4 * float(planned.c.max())
    table = [['design', 'runs', 'exaFLOPs', 'isoflop', 'bias', 'joint']]
    designs = isoflop_design.alternatives(planned, args.seeds, best)
    errors = [
        isoflop_design.expected_errors(design, target, args.noise, best) for design in designs
    ]
    for design, expected in zip(designs, errors, strict=True):
        cells = [expected.isoflop, expected.bias, expected.joint]
        row = ['-' if value is None else f'{value:.2g}' for value in cells]
        table.append([design.name, f'{design.runs}', f'{design.cost / 1e18:.4g}', *row])
    print(align(table, left=1))
    if args.precision:
        _print_prices(designs, [(e.isoflop, e.joint) for e in errors], args.precision)
    print(
        f'isoflop, joint: standard error of ln N* at {target:.3g} FLOPs by either method; bias: of '
        f'parabolas without\nnoise. For runs that scatter by {100 * args.noise:.2g} % and a '
        f'typical law with N* = {best[0]:.3g} at {best[1]:.3g} FLOPs. Laws do not hold\nexactly, '
        'which adds to the error. exaFLOPs: cost of separate runs'
    )


def _print_prices(
    designs: Sequence[StudyDesign],
    errors: Sequence[tuple[float | None, float | None]],
    precision: float,
) -> None:
    """Print the price of a precision by each method, for designs with the planned seeds."""
    for design, pair in zip(designs, errors, strict=True):
        if design.counts.sum() != designs[0].counts.sum():
            continue
        for way, error in zip(('isoflop', 'joint'), pair, strict=True):
            if error is not None:
                name = f'{design.name}, {way}'
                _print_price(name, error, design.runs, design.cost, precision)


def _parse_optimum(text: str | None) -> tuple[float, float] | None:
    """Parse `2e8@1e20` into N* and its budget."""
    if text is None:
        return None
    try:
        n, c = (float(part) for part in text.split('@'))
    except ValueError:
        raise UserError(f'--optimum {text!r}: write N*@C, such as 2e8@1e20') from None
    require_positive(n, '--optimum')
    require_positive(c, '--optimum')
    return n, c
