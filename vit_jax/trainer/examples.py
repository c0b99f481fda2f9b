"""Examples of an evaluation with their predictions, for the writers of a run.

They are drawn like files by the commands `predict` and `attention`. Training is not affected: none
of its random numbers are drawn, and a failure here only prints a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from vit_jax.config.run import Run
from vit_jax.data.batches import Batch, Process
from vit_jax.inference.example_set import ExampleSet, make_example_set
from vit_jax.runtime import processes
from vit_jax.trainer.evaluations import Evaluation
from vit_jax.trainer.program import EvalSteps, PyTree
from vit_jax.trainer.services import in_a_line
from vit_jax.trainer.writer import Writer
from vit_jax.viz import predictions
from vit_jax.viz.base import Viz


@dataclasses.dataclass(frozen=True)
class ExampleDisplay:
    """Examples of the first evaluation of a run, shown by its writers.

    Attributes:
      entry: Entry of `config.evals`.
      sample: Its examples.
    """

    entry: str
    sample: ExampleSet

    def show(self, steps: EvalSteps, variables: PyTree, step: int, writer: Writer) -> None:
        """Predict after `step` updates, on every process, and draw, on process 0."""
        trouble = ''
        try:
            read = list(self.sample.examples.values())
        except Exception as error:
            trouble = in_a_line(error)
        # If one process has no examples, no other may wait for it in the prediction.
        if troubles := processes.gather(trouble):
            writer.say(f'{self.entry}: no examples are shown: {troubles[0]}')
            return
        with self._said(writer, 'examples are'):
            rows = self._predict(steps, variables)
            if writer.enabled:
                drawn = self.sample.viz.show(rows, read, self.sample.context)
                writer.show(step, f'{self.entry}/examples', drawn)
        if steps.attention_step is not None and read:
            with self._said(writer, 'attention is'):
                self._show_attention(steps.attention_step, variables, step, writer)

    @contextlib.contextmanager
    def _said(self, writer: Writer, subject: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            writer.say(f'{self.entry}: no {subject} shown: {in_a_line(error)}')

    def _predict(self, steps: EvalSteps, variables: PyTree) -> list[Batch]:
        assert steps.predict is not None
        layout = steps.layout
        unit = layout.num_shards
        padded = self.sample.batch(-(-len(self.sample.examples) // unit) * unit)
        mine = Process.holding(layout.shards_here, unit).rows(len(padded['mask']))
        batch = {name: array[mine] for name, array in padded.items()}
        arrays, batch_fields = jax.device_get(steps.predict(variables, layout.put_batch(batch)))
        real = batch_fields['mask'] > 0
        rows = dict(
            zip(batch_fields['index'][real].tolist(), np.nonzero(real)[0].tolist(), strict=True)
        )
        return [
            {name: np.asarray(array[rows[i]]) for name, array in arrays.items()}
            for i in self.sample.examples
        ]

    def _show_attention(
        self, attention_step: Callable, variables: PyTree, step: int, writer: Writer
    ) -> None:
        outputs, maps = attention_step(variables, self.sample.batch_of_first())
        if not writer.enabled:
            return
        example = next(iter(self.sample.examples.values()))
        figure = self.sample.viz.draw_attention(example, outputs, maps, self.sample.context)
        if figure is not None:
            writer.show(step, f'{self.entry}/attention', figure)


def make_examples(
    run: Run, evaluations: Mapping[str, Evaluation], steps: EvalSteps
) -> ExampleDisplay | None:
    """Choose examples of a run's first evaluation on the model's own classes.

    Returns:
      The examples; None without predictions, such an evaluation, or writers.

    Raises:
      UserError: if the module that shows the task has no class `Viz`.
    """
    if steps.predict is None or not run.writers:
        return None
    own = (n for n, e in evaluations.items() if e.evaluator is None or not e.evaluator.learns)
    if (entry := next(own, None)) is None:
        return None
    data, section = evaluations[entry].data, run.evals[entry]
    viz = Viz()
    # A user's module that cannot be imported is an error of `predict` only.
    with contextlib.suppress(ImportError):
        viz = predictions.find_viz(run.task.name)
    return ExampleDisplay(entry, make_example_set(data, section, viz, str(run.model.name)))
