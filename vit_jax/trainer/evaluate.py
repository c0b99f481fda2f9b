"""The one evaluation loop: padded batches, every example exactly once.

What a task evaluates are masked sums, added up on the devices; an evaluator (see
`vit_jax.evaluators`) gets the predictions themselves on the host.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.config import construct, sections
from vit_jax.data import pipeline, sources, transforms, vocabulary
from vit_jax.data.buckets import Bucketed
from vit_jax.errors import UserError
from vit_jax.runtime import sharding

PyTree = Any
Batch = dict[str, np.ndarray]
IN_FLIGHT = 2  # batches on the devices while one is awaited


def open_data(
    section: ConfigDict, split: str | None = None, vocab: str | None = None
) -> tuple[Any, Any]:
    """The source and the transforms of a data section of the config.

    The transforms of a source in buckets have been applied: what is returned has none.

    Args:
      section: `config.data`, or an entry of `config.evals`.
      split: instead of that of the section.
      vocab: the file of the vocabulary where the section names none.
    """
    path = section.get('vocab', vocab)
    loaded = vocabulary.load(path) if path else None
    parsed = transforms.parse_transforms(section.get('transforms', ''), loaded)
    source = sources.open_source(section.source, split or section.split)
    if 'classes' in section:
        source = source.only_classes(section.classes)
    if not (bounds := section.get('buckets')):
        return source, parsed
    bucketed = Bucketed(source, parsed, bounds, section.get('cache', False))
    return bucketed, transforms.parse_transforms('', loaded)


def image_format(source: Any) -> dict[str, Any]:
    """What raw images of a source are like: {channels, size: [H, W] or None where it varies}.

    Stored with the checkpoints, so that a trained model reads new images without its data.
    """
    records = [source[i] for i in (0, len(source) // 2, len(source) - 1)]
    if any('image' not in record for record in records):
        return {}
    shapes = {record['image'].shape for record in records}
    height, width, channels = next(iter(shapes))
    return {'channels': channels, 'size': [height, width] if len(shapes) == 1 else None}


def loading(section: ConfigDict) -> dict[str, Any]:
    """What of a data section goes to the pipeline: how to load, not what."""
    chosen = sections.keywords(section)
    return {k: v for k, v in chosen.items() if k in sections.LOADING}


@dataclasses.dataclass(frozen=True)
class Pass:
    """Starts a pass over a split: padded batches with every example once.

    Attributes:
      source, transforms: as from `open_data`.
      batch_size: of the global batch; tokens where there are buckets.
      options: how to load, see `loading` and `pipeline.eval_batches`.
    """

    source: Any
    transforms: Any
    batch_size: int
    options: dict[str, Any]

    @property
    def info(self) -> Any:
        return self.source.info

    @property
    def vocab(self) -> Any:
        return self.transforms.vocab

    def text(self, index: int, /) -> dict[str, str]:
        """The strings of an example before the transforms make ids of them; empty without."""
        return self.source.text(index) if isinstance(self.source, Bucketed) else {}

    def __call__(self) -> Iterator[Batch]:
        return pipeline.eval_batches(
            self.source,
            self.transforms,
            batch_size=self.batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            **self.options,
        )


def open_pass(
    section: ConfigDict, config: ConfigDict, layout: sharding.Layout, split: str | None = None
) -> Pass:
    """The data of an entry of `config.evals`; `split` instead of its own."""
    source, parsed = open_data(section, split, config.data.get('vocab'))
    unit = math.lcm(layout.num_shards, jax.process_count())
    if isinstance(source, Bucketed):
        tokens = section.get('batch_size', config.batch_size)
        return Pass(source, parsed, tokens, loading(section) | {'multiple': unit})
    # Padding is masked, so that any multiple of the devices gives the same result.
    wanted = min(section.get('batch_size', config.batch_size), len(source))
    return Pass(source, parsed, math.ceil(wanted / unit) * unit, loading(section))


@dataclasses.dataclass(frozen=True)
class Steps:
    """What evaluations take of a task.

    Attributes:
      evaluate, predict: the compiled steps; `predict` is None for a task without one.
      derive: {metric: mean} of a whole pass -> what follows from them, for a task that has it.
    """

    evaluate: Callable
    predict: Callable | None
    derive: Callable[[dict[str, float]], dict[str, float]]


def compile_steps(model: Any, task: Any, layout: sharding.Layout, seed: int = 0) -> Steps:
    """Nothing is compiled before the first call of a step; `seed` is of what a model draws."""
    options: dict[str, Any] = {'seed': seed, 'axis_name': layout.axis_name}
    eval_step = step_lib.make_eval_step(model, task, **options)
    predict_step = step_lib.make_predict_step(model, task, **options)
    return Steps(
        evaluate=layout.compile_eval(eval_step),
        predict=layout.compile_eval(predict_step) if hasattr(task, 'predict') else None,
        derive=getattr(task, 'derive', lambda means: {}),
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An entry of `config.evals`, ready to run: a function from variables to {metric: value}.

    Attributes:
      run: that function.
      signature: how its numbers were made, where there is a standard for saying so.
    """

    run: Callable[[PyTree], dict[str, float]]
    signature: str = ''

    def __call__(self, variables: PyTree) -> dict[str, float]:
        return self.run(variables)


def open_evals(config: ConfigDict, layout: sharding.Layout, steps: Steps) -> dict[str, Evaluation]:
    """The evaluation of every entry of `config.evals`.

    Raises:
      UserError: for data that are not there, or do not suit the evaluator.
    """
    return {name: _open_eval(name, config, layout, steps) for name in config.evals}


def _open_eval(name: str, config: ConfigDict, layout: sharding.Layout, steps: Steps) -> Evaluation:
    section, where = config.evals[name], f'config.evals.{name}'
    test = open_pass(section, config, layout)
    evaluator = construct.make_evaluator(section, where)
    if evaluator is None:
        return Evaluation(lambda variables: _evaluate_task(steps, layout, variables, test()))
    if (predict_step := steps.predict) is None:
        raise UserError(f'{where}: task {config.task.name!r} has no predictions to evaluate')
    fit = open_pass(section, config, layout, section.fit) if evaluator.learns else None
    try:
        evaluator.open(test, fit)
    except UserError as e:
        raise UserError(f'{where}{f", {fit.source.title}" if fit else ""}: {e}') from e

    def run(variables: PyTree) -> dict[str, float]:
        evaluator.start()
        stages = [(evaluator.fit, fit)] if fit else []
        for take, one_pass in [*stages, (evaluator.update, test)]:
            for predictions, batch in predict(predict_step, layout, variables, one_pass()):
                take(predictions, batch)
        return evaluator.result()

    return Evaluation(run, evaluator.signature)


def _evaluate_task(
    steps: Steps, layout: sharding.Layout, variables: PyTree, batches: Iterable[Batch]
) -> dict[str, float]:
    means = evaluate(steps.evaluate, layout, variables, batches)
    return means | steps.derive(means)


def evaluate(
    eval_step: Callable, layout: sharding.Layout, variables: PyTree, batches: Iterable[Batch]
) -> dict[str, float]:
    """Means over one pass: {name: sum / count}, accumulated in float64 on the host."""
    totals: dict[str, np.ndarray] = {}
    for sums in _results(eval_step, layout, variables, batches):
        for name, pair in sums.items():
            totals[name] = totals.get(name, np.zeros(2)) + np.asarray(pair, np.float64)
    return {name: float(total / count) for name, (total, count) in totals.items()}


def predict(
    predict_step: Callable, layout: sharding.Layout, variables: PyTree, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Batch]]:
    """Predictions and what the model did not take, of all processes, without padding."""
    for rows in _results(predict_step, layout, variables, batches):
        real = rows[1]['mask'] > 0
        yield jax.tree.map(lambda x, real=real: x[real], rows)


def _results(
    step: Callable, layout: sharding.Layout, variables: PyTree, batches: Iterable[Batch]
) -> Iterator[Any]:
    """What `step` returns for each batch, on the host; the devices work ahead."""
    waiting: collections.deque[Any] = collections.deque()
    for batch in batches:
        waiting.append(step(variables, layout.put_batch(batch)))
        if len(waiting) > IN_FLIGHT:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())
