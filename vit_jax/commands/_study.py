"""`scaling study`: price an isoFLOP study, and create it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax.commands._parser import Parser, align
from vit_jax.config import load as config_lib
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.sweeps.isoflop import Bill, Isoflop, Run

COMMAND = 'scaling study'


def study(argv: Sequence[str]) -> int:
    """Price a family of shapes at several budgets; with --study NAME, queue its trials."""
    args = _parser().parse_args(argv)
    from vit_jax.commands.sweep import require_packages

    require_packages()
    from vit_jax.sweeps import isoflop
    from vit_jax.sweeps import study as study_lib

    family = read(args)
    bill = isoflop.bill(family)
    print(align(lines(isoflop.runs(family)), left=0))
    for line in (*words(family, bill), hours(family, bill, args)):
        print(line)
    if args.study is None:
        print('nothing is created yet: give --study NAME to queue these trials')
        return 0
    made = study_lib.create(family.sweep(), args.study, args.storage, args.workdir)
    count = len(made.sweep.queue())
    print(f'created {made.name}: {count} trials, runs in {made.folder}')
    print(f'work on it: python -m vit_jax sweep work {made.name}')
    return 0


def _parser() -> Parser:
    parser = Parser(COMMAND, study.__doc__)
    add = parser.add_argument
    add('file', metavar='FILE[:ARG]', help='its get_sweep gives an Isoflop; it is executed')
    add('--budget', metavar='C,C', help="FLOPs of a run, instead of the file's budgets")
    add('--study', metavar='NAME', help='create the study, for sweep work NAME')
    add('--storage', default='', metavar='URL', help='as of sweep create')
    add('--workdir', metavar='DIR', help='of all runs; runs/NAME by default')
    add('--device', default='TPU v3', metavar='KIND', help='as JAX names it (default: %(default)s)')
    add('--mfu', type=float, default=0.4, help='share of its peak (default: %(default)s)')
    add('--measure', action='store_true', help='time a few steps of every shape here instead')
    return parser


def read(args: argparse.Namespace) -> Isoflop:
    """The study of the file, with the budgets of the flag.

    Raises:
      UserError: if the file gives none, or a budget is no number.
    """
    from vit_jax.sweeps.isoflop import Isoflop

    found = config_lib.run_file(args.file, 'get_sweep', COMMAND)
    if not isinstance(found, Isoflop):
        raise UserError(
            f'{COMMAND}: get_sweep of {args.file!r} returns no Isoflop: sweep create takes others'
        )
    if args.budget is None:
        return found
    try:
        budgets = tuple(float(text) for text in args.budget.split(','))
    except ValueError:
        raise UserError(f'--budget {args.budget!r}: write FLOPs, as 2e15 or 1e15,1e16') from None
    return dataclasses.replace(found, budgets=budgets)


def lines(runs: Sequence[Run]) -> list[list[str]]:
    """A table: headings, and a line for each budget and shape with the number of seeds."""
    names = list(runs[0].shape)
    headings = ['budget', *(name.rpartition('.')[2] for name in names), 'parameters', 'batch']
    table = [[*headings, 'steps', 'warm-up', 'cooldown', 'examples', 'FLOPs', 'off', 'seeds']]
    for run in (run for run in runs if not run.seed):
        seeds = sum(r.shape is run.shape and r.budget == run.budget for r in runs)
        plan = run.plan
        counts = (plan.parameters, plan.batch_size, plan.steps, run.warmup, run.cooldown)
        table.append(
            [f'{run.budget:g}', *(str(run.shape[name]) for name in names)]
            + [f'{n:,.0f}' for n in (*counts, plan.examples)]
            + [f'{plan.flops:.4g}', f'{plan.flops / run.budget - 1:+.2%}', str(seeds)]
        )
    return table


def words(family: Isoflop, bill: Bill) -> list[str]:
    """Lines on the cost of the study, of branches and of seeds."""
    from vit_jax.sweeps import isoflop

    count = len(isoflop.runs(family))
    found = [f'{count} runs: {bill.separate:.4g} FLOPs, forward and backward']
    if bill.trunks:
        found.append(
            f'as branches of {bill.trunks} trunks at a constant rate: {bill.trained:.4g} FLOPs, '
            f'{bill.trained / bill.separate:.0%} of that'
        )
    if bill.seeds:
        found.append(
            f'seeds after the first: {bill.seeds:.4g} FLOPs, {bill.seeds / bill.trained:.0%} of '
            'what is trained'
        )
    return found


def hours(family: Isoflop, bill: Bill, args: argparse.Namespace) -> str:
    """A line on the time that it takes; shapes are timed here if the flag says so."""
    from vit_jax.profiling.plan import Machine

    if not args.measure:
        spent = Machine(args.device, args.mfu).chip_hours(bill.trained)
        return f'{spent:.3g} chip-hours of {args.device} at {args.mfu:.0%} of the peak'
    from vit_jax.sweeps import isoflop

    rates = isoflop.measured(family)
    spent = sum(n / rate for n, rate in zip(bill.examples, rates, strict=True)) / 3600
    shown = ', '.join(f'{rate:,.0f}' for rate in rates)
    return (
        f'{spent:.3g} hours of this machine, {bill.trained / spent / 3600:.3g} FLOP/s, without '
        f'evaluations and start-up; examples/s of each shape: {shown}'
    )
