"""`scaling plan`: the cost of runs before any of them starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands import _results
from vit_jax.commands._parser import Parser, align
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.profiling.plan import PlannedRun

COMMAND = 'scaling plan'


def plan(argv: Sequence[str]) -> int:
    """Price a sweep or a config before anything runs: parameters, FLOPs, chip-hours."""
    parser = Parser(COMMAND, plan.__doc__)
    add_flags(parser)
    add = parser.add_argument
    add('--seeds', type=int, default=0, metavar='N', help='compare N seeds of each run with others')
    add(
        '--target',
        type=float,
        metavar='FLOPS',
        help='of that prediction (default: 4 x the largest)',
    )
    add('--noise', type=float, default=0.02, help='of log y between seeds (default: %(default)s)')
    args, config = config_lib.parse_config_args(parser, argv)
    from vit_jax.profiling.plan import CORE, Machine, lines

    _check(args)
    machine = Machine(args.device, args.mfu)
    runs = read_runs(args, config)
    print(align(lines(runs, machine), left=0))
    searched = (
        '; what a search chooses costs at most this' if any(r.count > 1 for r in runs) else ''
    )
    if any(r.tokens for r in runs):
        print('tokens: of the target, without padding, which the FLOPs count')
    print(
        f'GFLOPs: forward, of one example; exaFLOPs: of training{searched}\n'
        f'chip-hours of {args.device}, core-days of {CORE}, at {args.mfu:.0%} of the peak'
    )
    if said := _repeated(runs):
        print(said)
    if args.seeds:
        _print_designs(runs, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    _results.require_count(args.seeds, '--seeds')
    _results.require_positive(args.target, '--target')
    if not 0 < args.noise < 1:
        raise UserError(f'--noise {args.noise:g}: must be more than 0 and less than 1')


def _repeated(runs: Sequence[PlannedRun]) -> str:
    """The cost of runs that differ from an earlier one in the seed alone; empty without any."""
    seen: set[str] = set()
    again = []
    for run in runs:
        setting = str({name: value for name, value in run.point.items() if name != 'seed'})
        if 'seed' in run.point and setting in seen:
            again.append(run.flops)
        seen.add(setting)
    share = sum(again) / sum(run.flops for run in runs)
    said = f'{len(again)} of {len(runs)} runs repeat another with a new seed: {share:.0%} of FLOPs'
    return said if again else ''


def _print_designs(runs: Sequence[PlannedRun], args: argparse.Namespace) -> None:
    """Print what seeds cost, and what they and other runs of the same cost tell."""
    from vit_jax.scaling import design

    each = [run.flops / run.count for run in runs for _ in range(run.count)]
    target = args.target or 4 * max(each)
    found = design.designs(each, args.seeds, target)
    if not found or any(run.count > 1 for run in runs):
        total = args.seeds * sum(each) / 1e18
        print(
            f'{args.seeds} seeds of each: {total:.4g} exaFLOPs; their use for a law can be told '
            f'of {design.LEAST} planned runs or more that differ in FLOPs'
        )
        return
    table = [['design', 'runs', 'exaFLOPs', *(f'error, {law}' for law in design.LAWS)]]
    for one in found:
        errors = [f'{100 * args.noise * error:.2g} %' for error in one.errors.values()]
        table.append([one.name, f'{one.runs}', f'{one.cost / 1e18:.4g}', *errors])
    print(align(table, left=1))
    print(
        f'error: expected of y at {target:.3g} FLOPs, predicted by such a law of y over FLOPs with '
        f'b = {design.EXPONENT}, if\nruns scatter by {100 * args.noise:.2g} %; c is half of y at '
        'the largest run. A law that bends misleads the more\nthe farther the target is'
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the runs, stand-ins for their data, and the device."""
    add = parser.add_argument
    add('file', nargs='?', metavar='FILE[:ARG]', help='a sweep; it is executed')
    add('--examples', type=float, metavar='N', help="of an epoch, without the config's data")
    add('--image-size', type=int, metavar='PIXELS', help='square images, likewise')
    add('--device', default='TPU v3', metavar='KIND', help='as JAX names it (default: %(default)s)')
    add('--mfu', type=float, default=0.4, help='share of its peak (default: %(default)s)')


def read_runs(args: argparse.Namespace, config: Any | None) -> list[PlannedRun]:
    """The runs that the flags name, with their costs.

    Args:
      args: of `add_flags`.
      config: of `--config`, instead of a sweep.

    Raises:
      UserError: for neither or both, a mistake in them, or data that are not available.
    """
    if (config is None) == (args.file is None):
        raise UserError(f'{COMMAND} needs one of FILE[:ARG] (a sweep) and --config FILE[:ARG]')
    if args.examples is not None and args.examples < 1:
        raise UserError(f'--examples {args.examples:g}: must be at least 1')
    from vit_jax.inference import fine_tune
    from vit_jax.profiling.cost import price
    from vit_jax.sweeps import space
    from vit_jax.sweeps.price import planned_runs

    if config is not None:
        return [price(fine_tune.filled(config).config, args.examples, args.image_size)]
    return planned_runs(space.load(args.file, COMMAND), args.examples, args.image_size)
