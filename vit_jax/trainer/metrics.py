"""The numbers that the evaluations of a config will give, known before anything runs."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.config import load as config_lib
from vit_jax.config import objects
from vit_jax.errors import UserError, nearest
from vit_jax.evaluators.base import Evaluator


def check(
    config: ConfigDict,
    metric: str,
    where: str,
    opened: Mapping[str, Evaluator | None] = types.MappingProxyType({}),
) -> None:
    """Check that an evaluation gives the metric, as far as that is known without running it.

    Args:
      config: of the run.
      metric: as `test/accuracy`.
      where: it was named, for the message.
      opened: evaluators that have seen their data, by the names of the evaluations.

    Raises:
      UserError: if there is no such evaluation, or it gives other numbers.
    """
    name, _, number = metric.partition('/')
    if name not in config.evals:
        mistake = nearest('evaluation', name, config.evals)
        raise UserError(f'{where}: metric {metric!r}: {mistake}')
    if not number:
        raise UserError(
            f'{where}: metric {metric!r}: name a number of that evaluation too, as {name}/accuracy'
        )
    evaluator = objects.make_evaluator(config.evals[name], f'config.evals.{name}')
    known = _of_task(config_lib.to_json(config)) if evaluator is None else evaluator.names()
    if known and number not in known:
        raise UserError(f'{where}: {nearest("metric", metric, [f"{name}/{k}" for k in known])}')
    if (seen := opened.get(name)) and known and number not in (here := seen.names()):
        raise UserError(
            f'{where}: {metric} cannot be measured on the data of config.evals.{name} (there: '
            f'{", ".join(here) or "nothing"})'
        )


def of_entry(results: Mapping[str, float], metric: str, where: str) -> float | None:
    """The metric of some evaluations; None if its own was not among them.

    Raises:
      UserError: if its evaluation gives other numbers; names `where` the metric was named.
    """
    entry = metric.partition('/')[0]
    if not any(name.startswith(f'{entry}/') for name in results):
        return None
    return pick(results, metric, where)


def pick(results: Mapping[str, float], metric: str, where: str) -> float:
    """The metric of an evaluation; raises UserError if it is not there."""
    if metric not in results:
        raise UserError(f'{where}: ' + nearest('metric', metric, results))
    return results[metric]


@functools.cache
def _of_task(text: str) -> tuple[str, ...]:
    """The numbers that the task of a config gives; none where the data are not on this machine."""
    from vit_jax.profiling.examples import row_of  # here, as most runs are judged by no metric

    try:
        config, spec, _ = row_of(config_lib.from_json(text))
    except UserError:
        return ()
    model, task = objects.model_and_task(config)
    batch = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    init = functools.partial(step_lib.init_variables, model, task, seed=0)
    sums = jax.eval_shape(step_lib.make_eval_step(model, task), jax.eval_shape(init, batch), batch)
    derived = task.derive(dict.fromkeys(sums, 1.0))
    return (*sums, *derived)
