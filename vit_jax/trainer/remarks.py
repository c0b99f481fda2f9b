"""Lines about unusual runs, each printed once: mistakes that cost a run and raise no error."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vit_jax.config.run import Run
from vit_jax.data.shared import shared_files
from vit_jax.optim import schedules
from vit_jax.trainer.build import Training

DAY = 86400.0  # seconds
HELD = 0.1  # share of the initial values in an average that is worth a line
EARLY = 0.1  # share of the steps after which accuracy at chance is worth a line
BATCH_STATS = 'batch_stats'


class Remarks:
    """Lines about a run.

    Args:
      training: The run.
    """

    def __init__(self, training: Training):
        self.training, self._said = training, set[str]()
        self._on_cpu = training.program.layout.mesh.devices.flat[0].platform == 'cpu'

    def at_start(self) -> list[str]:
        """Lines that follow from the config."""
        training = self.training
        remarks = [
            *_trained_splits(training.run),
            *self._shared_files(),
            _warmup(training),
            *self._averages(),
            self._batch_norm(),
        ]
        return [line for line in remarks if line]

    def about_pace(self, step: int, step_sec: float) -> str:
        """Return a line if a CPU needs more than a day for the steps after `step`; else empty."""
        days = (self.training.timetable.total - step) * step_sec / DAY
        if not self._on_cpu or days <= 1:
            return ''
        return self._once(
            'pace',
            f'about {days:,.0f} days are left on this CPU: smaller images (vit/own:56), adapters '
            '(vit/own:lora), a smaller model or a shorter config.total take less',
        )

    def about_accuracy(self, step: int, results: Mapping[str, float]) -> str:
        """Warn if accuracy is at chance level after a tenth of the run; else return ''."""
        training = self.training
        if step < EARLY * training.timetable.total:
            return ''
        for name, evaluation in training.evaluations.items():
            accuracy = results.get(f'{name}/accuracy')
            data, classes = evaluation.data, evaluation.data.info.num_classes
            if accuracy is None or not classes or classes < 2 or evaluation.evaluator:
                continue
            count, examples = data.class_counts, len(data.source)
            if count is not None and int(count.sum()) != examples:  # several labels an example
                continue
            chance = 1 / classes if count is None else float(count.max()) / examples
            if accuracy > chance + 2 * math.sqrt(chance * (1 - chance) / examples):
                continue
            return self._once(
                'chance',
                f'{name}/accuracy {accuracy:.3f} after step {step} of {training.timetable.total} '
                f'is no better than chance ({chance:.3f}): check config.optim.lr and its warm-up, '
                'the labels and the transforms',
            )
        return ''

    def _shared_files(self) -> list[str]:
        """Warn of each evaluation that holds copies of training files."""
        training = self.training
        lines = []
        for name, evaluation in training.evaluations.items():
            if name.startswith('train') or _reads_training(training.run, name):
                continue
            held_out = evaluation.data.source
            if pairs := shared_files(training.data.source, held_out):
                train_file, eval_file = pairs[0]
                lines.append(
                    f'config.evals.{name}: {len(pairs):,} of {len(held_out):,} files are also '
                    f'training files, such as {eval_file} and {train_file}: remove the copies'
                )
        return lines

    def _averages(self) -> list[str]:
        training, step = self.training, self.training.run.step
        lines, total = [], training.timetable.total
        for peak, decay in zip(
            step.ema_decays, schedules.average_decays(step, training.times), strict=True
        ):
            values = decay(np.arange(total)) if callable(decay) else np.full(total, decay)
            share = float(np.prod(np.asarray(values, np.float64)))
            if share > HELD:
                lines.append(
                    f'the average of the parameters still holds {share:.0%} of its initial values '
                    f'after {total:,} steps: config.step.ema_decay={peak:g} is for longer runs; '
                    f'{math.floor(1e4 * 0.01 ** (1 / total)) / 1e4:g} leaves 1%, and '
                    'config.step.ema_warmup=True in a new run almost nothing'
                )
        return lines

    def _batch_norm(self) -> str:
        run, state = self.training.run, self.training.program.abstract_state
        if run.step.accum_steps < 2 or BATCH_STATS not in state.collections:
            return ''
        return (
            f'batch norm normalizes each of the {run.step.accum_steps} microbatches by itself, '
            'unlike a whole batch: config.step.accum_steps=1 avoids this'
        )

    def _once(self, kind: str, line: str) -> str:
        if kind in self._said:
            return ''
        self._said.add(kind)
        return line


def _warmup(training: Training) -> str:
    schedule, total = training.run.optim.schedule, training.timetable.total
    requested = training.times.steps(schedule.warmup)
    if (steps := schedules.fit_warmup(schedule, training.times, total)) == requested:
        return ''
    return (
        f'the warm-up of {requested:,} steps does not fit into {total:,} steps and takes '
        f"{steps:,}: set config.optim.schedule.warmup, such as '5%'"
    )


def _trained_splits(run: Run) -> list[str]:
    """Warn of each evaluation on training examples, unless it is named `train...`."""
    return [
        f'config.evals.{name} reads the examples that are trained on ({run.data.split!r} of '
        f'{run.data.source}): its results do not measure generalization'
        for name in run.evals
        if _reads_training(run, name) and not name.startswith('train')
    ]


def _reads_training(run: Run, name: str) -> bool:
    """Return whether an evaluation reads the same examples as training."""
    entry = run.evals[name]
    data = (run.data.source, run.data.split, run.data.classes)
    return (entry.source, entry.split, entry.classes) == data
