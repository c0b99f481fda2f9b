"""Examples of an evaluation with what the model makes of them, for the writers of a run.

They are drawn as the commands `predict` and `attention` draw files. Nothing that trains is touched:
no random number of training is drawn, and whatever fails here is said in a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.data import sources
from vit_jax.data.batches import Batch, Process
from vit_jax.data.buckets import Buckets
from vit_jax.data.records import Record
from vit_jax.data.transforms import parse_transforms, without_annotations
from vit_jax.runtime import processes
from vit_jax.trainer.evaluate import EvalSteps, PyTree
from vit_jax.trainer.evaluations import Evaluation
from vit_jax.trainer.shown import Images, Texts, batch_of
from vit_jax.trainer.writer import Writer, in_a_line
from vit_jax.viz import figures, predictions


@dataclasses.dataclass(frozen=True)
class Examples:
    """What is shown of the first evaluation of a run.

    Attributes:
      entry: of `config.evals`.
      shown: its examples.
      attention: whether the writers get a picture of where the model has looked in the first.
    """

    entry: str
    shown: Images | Texts
    attention: bool = False

    def show(self, steps: EvalSteps, variables: PyTree, step: int, writer: Writer) -> None:
        """Predict and draw; every process takes part in the former, process 0 draws.

        Args:
          steps: of the evaluations.
          variables: of the model, after `step`.
          step: the number of updates made.
          writer: of the run.
        """
        read: Mapping[int, Record] = {}
        trouble = ''
        try:
            read = self.shown.read()
        except Exception as error:
            trouble = in_a_line(error)
        # Where one process has no examples, none may wait for it in the prediction.
        if troubles := processes.gather(trouble):
            writer.say(f'{self.entry}: no examples are shown: {troubles[0]}')
            return
        with self._said(writer, 'examples are'):
            rows = self._predict(steps, variables, read)
            if writer.enabled:
                self.shown.show(writer, step, f'{self.entry}/examples', rows)
        if self.attention and read:
            with self._said(writer, 'attention is'):
                self._look(steps, variables, step, writer, *next(iter(read.items())))

    @contextlib.contextmanager
    def _said(self, writer: Writer, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            writer.say(f'{self.entry}: no {what} shown: {in_a_line(error)}')

    def _predict(
        self, steps: EvalSteps, variables: PyTree, read: Mapping[int, Record]
    ) -> list[Batch]:
        assert steps.predict is not None
        process = Process(jax.process_index(), jax.process_count())
        unit = math.lcm(steps.layout.num_shards, process.count)
        whole = batch_of(self.shown.data, read, -(-len(read) // unit) * unit)
        mine = process.rows(len(whole['mask']))
        batch = {name: array[mine.start : mine.stop] for name, array in whole.items()}
        found, small = jax.device_get(steps.predict(variables, steps.layout.put_batch(batch)))
        real = np.flatnonzero(small['mask'] > 0)
        rows = dict(zip(small['index'][real].tolist(), real.tolist(), strict=True))
        return [{name: array[rows[i]] for name, array in found.items()} for i in read]

    def _look(
        self,
        steps: EvalSteps,
        variables: PyTree,
        step: int,
        writer: Writer,
        index: int,
        record: Record,
    ) -> None:
        assert steps.look is not None
        outputs, maps = steps.look(variables, self.shown.alone(index, record))
        if writer.enabled:
            figure = self.shown.draw_attention(index, outputs, maps)
            writer.image(step, f'{self.entry}/attention', figures.pixels(figure))


def of_run(
    config: ConfigDict, evaluations: Mapping[str, Evaluation], steps: EvalSteps
) -> Examples | None:
    """The examples of the first evaluation of the model's own classes; None if nobody shows them.

    Args:
      config: of the run.
      evaluations: its own.
      steps: of them.
    """
    classes = map(schema.writer_class, config.get('writers', schema.Config.writers))
    takes = {method for cls in classes for method in ('image', 'texts') if hasattr(cls, method)}
    if steps.predict is None or not takes:
        return None
    own = (n for n, e in evaluations.items() if e.evaluator is None or not e.evaluator.learns)
    if (entry := next(own, None)) is None:
        return None
    data, section = evaluations[entry].data, config.evals[entry]
    attention = 'image' in takes and steps.look is not None
    if data.image_size is not None:
        viz = None
        # What a module of the user's own cannot import, `predict` tells.
        with contextlib.suppress(ImportError):
            viz = predictions.find(config.task.name)
        if 'image' not in takes or not hasattr(viz, 'draw'):
            return None
        padded = tuple(section.sizes[-1]) if section.get('sizes') else None
        spec = section.get('transforms', '')
        bare = parse_transforms(without_annotations(spec))
        images = Images(data, parse_transforms(spec), bare, padded, viz)
        return Examples(entry, images, attention)
    vocab = data.vocab or sources.own_vocab(section.source)
    if vocab is None or not isinstance(data, Buckets) or 'texts' not in takes:
        return None
    return Examples(entry, Texts(data, vocab, config.model.name), attention)
