"""Subcommand `scaling curve`: predict the end of a run from its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.commands._parser import Parser, add_json_flag
from vit_jax.errors import UserError, nearest

ENDED = 0.9  # share of its steps from which on a run counts as ended

if TYPE_CHECKING:
    from vit_jax.scaling.annealing import LossCurve, Prediction
    from vit_jax.storage import paths


def predict_run(argv: Sequence[str]) -> int:
    """Predict the final loss of a run from its start, and from runs with other schedules."""
    parser = Parser('scaling curve', predict_run.__doc__)
    add = parser.add_argument
    add('run', metavar='DIR', help='folder of the run, which may still train')
    add('others', nargs='*', metavar='DIR', help='runs of the same model, data and batch')
    add('--metric', default='train/loss', help='metric, such as val/loss (default: %(default)s)')
    until = 'share of the steps to fit, to compare the prediction with the rest (default: all)'
    add('--until', type=float, default=1.0, metavar='SHARE', help=until)
    add('--law', default='multipower', help='multipower or annealing (default: %(default)s)')
    add_json_flag(parser)
    args = parser.parse_args(argv)
    if not 0 < args.until <= 1:
        raise UserError(f'--until {args.until:g}: must be more than 0 and at most 1')
    from vit_jax.scaling import annealing
    from vit_jax.storage import paths

    if args.law not in annealing.LAWS:
        raise UserError(nearest('law', args.law, annealing.LAWS))
    folders = [paths.path(folder) for folder in (args.run, *args.others)]
    target, *others = (read_curve(curve_folder, args.metric) for curve_folder in folders)
    beginning = target.until(int(args.until * len(target.rates)))
    if not len(beginning.steps):
        raise UserError(f'{args.run}: no {args.metric} up to --until {args.until:g} of its steps')
    total = len(target.rates)
    ended = len(target.loss) > len(beginning.loss) and target.steps[-1] > ENDED * total
    measured = float(target.loss[-1]) if ended else None
    end = int(target.steps[-1]) if ended else total
    prediction = annealing.predict_end(beginning, others, args.law, end)
    summary = _summary(prediction, args.metric, end, int(beginning.steps[-1]), measured)
    if args.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print('\n'.join(_describe(summary, len(others))))
    return 0


def read_curve(folder: paths.Path, metric: str) -> LossCurve:
    """Read a metric of a run, and the learning rate of each of its steps up to the end.

    Raises:
      UserError: The folder is not a run, has no checkpoint, or lacks the metric.
    """
    import numpy as np

    from vit_jax.config.load import from_dict, section
    from vit_jax.config.run import Durations, Optim, parse_duration
    from vit_jax.optim import schedules
    from vit_jax.scaling import annealing
    from vit_jax.storage import run_folder

    stored = run_folder.read_config(folder)
    if stored is None:
        raise UserError(f'{folder} is not a run: it has no {run_folder.CONFIG}')
    series = run_folder.read_series(folder)
    if metric not in series:
        losses = ', '.join(name for name in series if name.endswith('/loss')) or 'none'
        raise UserError(f'{folder} has no metric {metric!r}; losses: {losses}')
    config = from_dict(stored)
    saved = run_folder.newest(folder)
    examples = run_folder.read_meta(saved).get('num_examples', 0) if saved else 0
    if not examples and parse_duration(config.total, 'config.total')[1] == 'epochs':
        raise UserError(f'{folder} has no checkpoint yet, which holds the length of its epochs')
    times = Durations.of(config.total, float(config.batch_size), examples)
    optim = section(config, Optim)
    rates = schedules.make_schedule(optim.schedule, optim.lr, times)(np.arange(times.total_steps))
    steps, loss = series[metric]
    gaps = np.diff(steps, prepend=0)
    good = np.isfinite(loss) & (loss > 0) & (steps <= times.total_steps)
    if metric.startswith('train/'):  # a mean over the steps since the line before
        good &= gaps >= np.median(gaps) / 2
        steps = steps - gaps // 2
    return annealing.LossCurve(np.asarray(rates, float), steps[good], loss[good])


def _summary(
    prediction: Prediction, metric: str, steps: int, beginning: int, measured: float | None
) -> dict[str, Any]:
    fit = prediction.fit
    return {
        'metric': metric,
        'law': fit.law,
        'steps': steps,
        'known_steps': beginning,
        'known_share_of_rates': prediction.share,
        'value': prediction.value,
        'band': list(prediction.band),
        'measured': measured,
        'L0': float(fit.scales[0]),
        'rms_of_relative_errors': fit.error,
    }


def _describe(summary: dict[str, Any], others: int) -> list[str]:
    low, high = summary['band']
    after = f', and {others} other run(s)' if others else ''
    lines = [
        f'{summary["metric"]} at step {summary["steps"]:,}: {summary["value"]:.4g} '
        f'[{low:.4g}, {high:.4g}]',
        f'from the losses up to step {summary["known_steps"]:,}{after}: '
        f'{summary["known_share_of_rates"]:.0%} of the sum of learning rates',
        f'{summary["law"]}: relative errors of {summary["rms_of_relative_errors"]:.2g} (root mean '
        'square)',
    ]
    if summary['measured'] is not None:
        off = summary['value'] / summary['measured'] - 1
        lines.append(f'measured: {summary["measured"]:.4g}, predicted {off:+.1%}')
    return lines
