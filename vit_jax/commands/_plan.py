"""`scaling plan`: the cost of runs before any of them starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    args, config = config_lib.parse_config_args(parser, argv)
    from vit_jax.profiling.plan import CORE, Machine, lines

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
    return 0


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
