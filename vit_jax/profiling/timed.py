"""A config's steps, ready to be timed."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import defaults, objects
from vit_jax.optim import make as optim
from vit_jax.optim import schedules
from vit_jax.profiling import benchmark
from vit_jax.profiling.benchmark import Timing
from vit_jax.profiling.task_flops import Spec
from vit_jax.runtime import mesh, sharding
from vit_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class Timed:
    """The parts of the steps that a config compiles.

    Attributes:
      config: complete.
      rows: of a batch.
      model, task: of the config.
      layout: of its devices.
    """

    config: ConfigDict
    rows: int
    model: Any
    task: Task
    layout: sharding.Layout

    def forward(self, spec: Spec, per_row: float = 1, steps: int = 20) -> Timing:
        """Times the eval step, see `benchmark.time_forward`."""
        return benchmark.time_forward(
            self.model,
            self.task,
            self.layout,
            spec,
            batch_size=self.rows,
            per_row=per_row,
            steps=steps,
        )

    def train(self, spec: Spec, per_row: float = 1, steps: int = 20) -> Timing:
        """Times the train step, see `benchmark.time_train`."""
        return benchmark.time_train(
            self.model,
            self.task,
            self._tx,
            self.layout,
            spec,
            batch_size=self.rows,
            per_row=per_row,
            steps=steps,
            **self._step(),
        )

    def _step(self) -> dict[str, Any]:
        # Schedules would need the length of the run, and cost nothing.
        return defaults.arguments(self.config, 'step') | {'ema_schedule': schedules.CONSTANT}

    def _tx(self, params: Any) -> Any:
        constant = dict.fromkeys(('schedule', 'decay_schedule'), schedules.CONSTANT)
        options = self.config.optim.to_dict() | constant | {'lr_delays': ()}
        return optim.make(params, 1, int, self.model.layer_order(), **options)[0]


def of_config(config: ConfigDict, rows: int) -> Timed:
    """The steps of a complete config for batches of so many rows.

    Raises:
      UserError: for a mistake in the config, or a batch that its devices cannot share.
    """
    model, task = objects.model_and_task(config)
    devices = mesh.usable_devices()
    layout = sharding.make_layout(devices, **defaults.arguments(config, 'parallel'))
    sharding.check_batch(
        layout,
        rows,
        accum_steps=defaults.arguments(config, 'step')['accum_steps'],
        multiple=task.multiple,
        reason=task.multiple_reason,
    )
    return Timed(config, rows, model, task, layout)
