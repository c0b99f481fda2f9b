"""Best step of a run by its evaluations, and whether the run ends early.

Every checkpoint stores the best results so far, so that a resumed run decides like an uninterrupted
one. Processes may differ in the last bit of a result, so process 0 decides for all.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints.best import KEPT, Best, best_from_meta
from vit_jax.config import objects
from vit_jax.config.load import from_json, model_and_task, to_json, to_run
from vit_jax.config.run import EarlyStop, Run, parse_goal
from vit_jax.errors import UserError, nearest
from vit_jax.evaluators.base import Evaluator
from vit_jax.runtime import processes
from vit_jax.step import init_variables, make_eval_step

Bests = Mapping[str, Best]
EARLY_STOP = 'early_stop'  # beside KEPT, a key of a checkpoint's metadata

_WHERE = {KEPT: 'config.checkpoint.keep_best', EARLY_STOP: 'config.early_stop.metric'}


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges evaluations by the goals of a config.

    Attributes:
      keep_best: `config.checkpoint.keep_best`.
      early_stop: `config.early_stop`.
    """

    keep_best: str = ''
    early_stop: EarlyStop = dataclasses.field(default_factory=EarlyStop)

    @property
    def goals(self) -> dict[str, str]:
        """Goals that the config sets, as texts."""
        goals_by_key = {KEPT: self.keep_best, EARLY_STOP: self.early_stop.metric}
        return {key: text for key, text in goals_by_key.items() if text}

    @property
    def notes(self) -> list[str]:
        """A line for each goal, with the direction in which results get better."""
        goals = {key: parse_goal(text, _WHERE[key]) for key, text in self.goals.items()}
        lines = []
        if KEPT in goals:
            lines.append(f'keeps the step with the {goals[KEPT]}')
        if EARLY_STOP in goals:
            patience = self.early_stop.patience
            lines.append(f'ends early {patience} evaluations after the {goals[EARLY_STOP]}')
        return lines

    def begin(self, meta: Mapping[str, Any]) -> Bests:
        """Return the best results at the time of a checkpoint, only of this run's goals.

        Args:
          meta: Metadata of the checkpoint; empty for a new run.
        """
        begun = {}
        for key, text in self.goals.items():
            stored = best_from_meta(meta, key)
            begun[key] = stored if stored and stored.goal == text else Best(text)
        return begun

    def after(self, bests: Bests, step: int, results: Mapping[str, float]) -> Bests:
        """Return the best results after the evaluations of `step`.

        Raises:
          UserError: if an evaluation lacks the metric of its goal.
        """
        updated = dict(bests)
        for key, best in bests.items():
            goal = parse_goal(best.goal, _WHERE[key])
            value = entry_metric(results, goal.metric, _WHERE[key])
            if value is None:
                continue
            by = self.early_stop.min_delta if key == EARLY_STOP else 0.0
            if _agreed(goal.is_better(value, best.value, by)):
                updated[key] = Best(best.goal, step, value)
            else:
                updated[key] = dataclasses.replace(best, since=best.since + 1)
        return updated

    def has_ended(self, bests: Bests) -> bool:
        """Return whether the run ends before its total."""
        best = bests.get(EARLY_STOP)
        return best is not None and best.since >= self.early_stop.patience

    def reason(self, bests: Bests) -> str:
        """Return the reason for an early end as a sentence; empty without one."""
        if not self.has_ended(bests):
            return ''
        best = bests[EARLY_STOP]
        metric = parse_goal(best.goal, _WHERE[EARLY_STOP]).metric
        was = 'was never a number' if best.step is None else f'was best after step {best.step}'
        value = '' if best.value is None else f' ({best.value:.4f})'
        times = f'{best.since} evaluation{"s" if best.since > 1 else ""}'
        return f'early stop: {metric} {was}{value}, and no better in {times} since'


def make_judge(config: ConfigDict, run: Run, opened: Mapping[str, Evaluator | None]) -> Judge:
    """Return the judge of a config.

    Args:
      config: Config of the run.
      run: Typed form of the config.
      opened: The evaluators of `config.evals`, which have seen their data.

    Raises:
      UserError: for a metric that is known to be missing from its evaluations.
    """
    judge = Judge(run.checkpoint.keep_best, run.early_stop)
    for key, text in judge.goals.items():
        check_metric(config, parse_goal(text, _WHERE[key]).metric, _WHERE[key], opened)
    return judge


def _agreed(decision: bool) -> bool:
    return bool(processes.on_process_0(lambda: decision))


def check_metric(
    config: ConfigDict,
    metric: str,
    key: str,
    opened: Mapping[str, Evaluator | None] = types.MappingProxyType({}),
) -> None:
    """Check that an evaluation gives the metric, as far as is known without running it.

    Args:
      config: Config of the run.
      metric: Metric such as `test/accuracy`.
      key: The key that names it, for the message.
      opened: Evaluators that have seen their data, by the names of the evaluations.

    Raises:
      UserError: if there is no such evaluation, or it gives other metrics.
    """
    name, _, number = metric.partition('/')
    evals = to_run(config).evals
    if name not in evals:
        mistake = nearest('evaluation', name, evals)
        raise UserError(f'{key}: metric {metric!r}: {mistake}')
    if not number:
        raise UserError(
            f'{key}: metric {metric!r}: name a number of that evaluation too, as {name}/accuracy'
        )
    evaluator = objects.make_evaluator(evals[name], f'config.evals.{name}')
    declared = _task_metrics(to_json(config)) if evaluator is None else evaluator.names()
    if declared and number not in declared:
        raise UserError(f'{key}: {nearest("metric", metric, [f"{name}/{k}" for k in declared])}')
    if (
        (evaluation := opened.get(name))
        and declared
        and number not in (measured := evaluation.names())
    ):
        raise UserError(
            f'{key}: {metric} cannot be measured on the data of config.evals.{name} (there: '
            f'{", ".join(measured) or "nothing"})'
        )


def entry_metric(results: Mapping[str, float], metric: str, key: str) -> float | None:
    """Return the metric among the results; None if its evaluation did not run.

    Raises:
      UserError: if its evaluation gives other metrics; names `key`, the key of the metric.
    """
    entry = metric.partition('/')[0]
    if not any(name.startswith(f'{entry}/') for name in results):
        return None
    return pick(results, metric, key)


def pick(results: Mapping[str, float], metric: str, key: str) -> float:
    """Return the metric of an evaluation; UserError if it is missing."""
    if metric not in results:
        raise UserError(f'{key}: ' + nearest('metric', metric, results))
    return results[metric]


@functools.cache
def _task_metrics(text: str) -> tuple[str, ...]:
    """Return the metrics of the task of a config; empty if the data are not on this machine."""
    from vit_jax.profiling.batch_spec import row_of  # imported here, as most runs set no goal

    try:
        config, spec, _ = row_of(from_json(text))
    except UserError:
        return ()
    model, task = model_and_task(config)
    batch = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    init = functools.partial(init_variables, model, task, seed=0)
    sums = jax.eval_shape(make_eval_step(model, task), jax.eval_shape(init, batch), batch)
    derived = task.derive(dict.fromkeys(sums, 1.0))
    return (*sums, *derived)
