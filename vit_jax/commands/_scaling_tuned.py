"""Subcommand `scaling tuned`, and its law in `scaling plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import Parser, add_json_flag, align
from vit_jax.commands._scaling_laws import parse_names, require_positive
from vit_jax.errors import UserError

if TYPE_CHECKING:
    from vit_jax.profiling.cost import PlannedRun
    from vit_jax.scaling.tuned import TunedLaw

CONFIG = 'config.'  # prefix of the columns of config values
BATCH = 'batch_size'


def tuned(argv: Sequence[str]) -> int:
    """Fit the best learning rate or batch size over model and data size."""
    parser = Parser('scaling tuned', tuned.__doc__)
    add = parser.add_argument
    add('--csv', metavar='FILE', required=True, help='table with a header, as of collect')
    loss = 'column of a loss; 1-COL for one minus an accuracy'
    add('--y', metavar='COL', required=True, help=loss)
    default_note = ' (default: %(default)s)'
    hyper = f'columns of hyperparameters, such as config.optim.lr,batch_size{default_note}'
    add('--tuned', metavar='COL,COL', default='config.optim.lr', help=hyper)
    sizes = f'columns of model and data size, or only of compute{default_note}'
    add('--over', metavar='COL,COL', default='parameters,examples_seen', help=sizes)
    add('--at', metavar='V,V', help='values of --over at which the best values are predicted')
    add_json_flag(parser)
    args = parser.parse_args(argv)
    from vit_jax.scaling import rows
    from vit_jax.scaling import tuned as laws

    over, hypers = parse_names(args.over), parse_names(args.tuned)
    if not over or not hypers or len({*over, *hypers}) < len(over) + len(hypers):
        raise UserError('--tuned and --over need one column or more each, all different')
    targets = _parse_sizes(args.at, over)
    law = laws.fit(rows.read_csv(args.csv), hypers, over, args.y)
    summary: dict[str, Any] = law.to_json()
    if targets:
        best = zip(hypers, law.best(targets), strict=True)
        summary['at'] = {
            'sizes': dict(zip(over, targets, strict=True)),
            'best': {name: {'value': value, 'band': band} for name, (value, band) in best},
        }
    if args.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print('\n'.join([*laws.describe(law), *(laws.predict(law, targets) if targets else ())]))
    return 0


def _parse_sizes(text: str | None, over: Sequence[str]) -> list[float]:
    """Parse '1e8,2e9' into a size for each column; [] without a text."""
    if text is None:
        return []
    try:
        sizes = [float(part) for part in text.split(',')]
    except ValueError:
        sizes = []
    if len(sizes) != len(over):
        raise UserError(f'--at {text!r}: write a number for each of {", ".join(over)}')
    for size in sizes:
        require_positive(size, '--at')
    return sizes


def add_tuned_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--tuned` to `plan`."""
    law = 'law of scaling tuned --json, for the best values of each run'
    parser.add_argument('--tuned', metavar='FILE', help=law)


def read_law(path: str) -> TunedLaw:
    """Read the law of a file of `scaling tuned --json`.

    Raises:
      UserError: The file cannot be read, or has another content.
    """
    from vit_jax.scaling import tuned as laws
    from vit_jax.storage import paths

    try:
        return laws.from_json(json.loads(paths.read_bytes(path)))
    except OSError as e:
        raise UserError(f'--tuned {path!r} cannot be read: {e.strerror}') from e
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(
            f'--tuned {path!r} is not a law: write one with scaling tuned ... --json > {path}'
        ) from e


def tuned_lines(law: TunedLaw, runs: Sequence[tuple[PlannedRun, float]]) -> list[str]:
    """Tabulate the planned and the best value of each hyperparameter of runs, and its interval.

    Args:
      law: Law of the best values.
      runs: Planned runs, each with the number of examples that it sees.

    Raises:
      UserError: The law is over sizes that a plan does not know.
    """
    from vit_jax.scaling.tuned import format_value

    size_names = ('parameters', 'examples_seen', 'flops')
    if unknown := [name for name in law.over if name not in size_names]:
        raise UserError(
            f'--tuned: the law is over {unknown[0]}; a plan has {", ".join(size_names)}: fit it '
            'over '
            'these by scaling tuned --over'
        )
    table = [['parameters', 'examples', *(h for name in law.tuned for h in (name, 'best'))]]
    far = 1.0
    for run, examples in runs:
        sizes = {
            'parameters': float(run.parameters),
            'examples_seen': examples,
            'flops': examples * run.train,
        }
        target = [sizes[name] for name in law.over]
        far = max(far, law.beyond(target))
        row = [f'{run.parameters:,}', f'{examples:,.0f}']
        for name, best in zip(law.tuned, law.best(target), strict=True):
            row += [_planned(run, name), format_value(*best)]
        table.append(row)
    lines = align(list(map(list, dict.fromkeys(map(tuple, table)))), left=0).splitlines()
    if far > 1:
        lines.append(f'up to {far:.3g} times beyond the sizes from which the best values follow')
    return lines


def _planned(run: PlannedRun, name: str) -> str:
    """Format the value that a run was given; a dash if the plan does not vary it."""
    if name == BATCH:
        return f'{run.batch_size:g}'
    value = run.point.get(name.removeprefix(CONFIG))
    return f'{value:g}' if isinstance(value, (int, float)) else '-'
