"""First steps of a run in a separate process, which a rehearsal starts and kills.

    python -m vit_jax.rehearsal.dry_run request.json

It ends when its standard input closes, and so never outlives the rehearsal. Unlike the config's
run, it logs, evaluates and saves after every step, evaluates one batch, and uses no services.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax.config.load import from_dict
from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.profiling import task_flops
from vit_jax.runtime import process
from vit_jax.runtime.memory import OutOfMemory
from vit_jax.runtime.watchdog import Stopping, no_stop
from vit_jax.trainer import train
from vit_jax.trainer.build import Training, build

TOO_LARGE, OUT_OF_MEMORY = 4, 5  # exit codes
CPU_FLOPS = 2e12  # of a step that CPUs finish in about a minute
WAITS = 3  # the step whose evaluation does not end, so that the process can be killed during it


class TooLarge(Exception):
    """A run is too large for this machine; the message gives the reason."""


class Request(NamedTuple):
    """A requested run.

    Attributes:
      config: Config as a dict.
      folder: Run folder.
      facts: Local file for the `Facts` of the run.
      allowed: Allowed modules, see `train`.
      last: Step after which it ends; None to wait until killed.
      small: Whether to use the smallest batches that the config allows.
    """

    config: dict[str, Any]
    folder: str
    facts: str
    allowed: tuple[str, ...] = ()
    last: int | None = None
    small: bool = False


class Facts(NamedTuple):
    """Facts about a run on this machine.

    Attributes:
      hardware: Devices.
      batch_size: Batch size in `unit`.
      unit: Images, examples or tokens.
      total: Length of the whole run in steps.
      state_bytes: Bytes of a checkpoint.
      evaluations: Names of the evaluations.
    """

    hardware: str
    batch_size: int
    unit: str
    total: int
    state_bytes: int
    evaluations: list[str]


def main() -> int:
    """Train as requested in the file; return the exit code."""
    process.end_with_parent(lambda: None)
    request = Request(**json.loads(pathlib.Path(sys.argv[1]).read_bytes()))
    try:
        act(request)
    except train.Preempted:
        pass
    except TooLarge as error:
        print(f'error: {error}', file=sys.stderr)
        return TOO_LARGE
    except OutOfMemory as error:
        print(f'error: {error}', file=sys.stderr)
        return OUT_OF_MEMORY
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return getattr(error, 'exit_code', EXIT_FAILED)
    return 0


def act(request: Request) -> None:
    """Train as requested.

    Raises:
      TooLarge: on CPUs, for a step that takes minutes, or a state that does not fit.
      Preempted: after the last step.
      UserError: as `train`.
    """

    def adapt(training: Training) -> Training:
        facts = facts_of(training)
        if training.program.layout.mesh.devices.flat[0].platform == 'cpu':
            require_suitable(training, facts)
        with open(request.facts, 'w') as file:
            json.dump(facts._asdict(), file)
        return with_short_evaluations(training)

    def report(step: int, results: dict[str, float]) -> bool:
        while request.last is None and step >= WAITS:
            time.sleep(60)
        return False

    config = with_all_due(from_dict(request.config))
    if request.small:
        config = smallest(config)
    train.train(
        config,
        request.folder,
        stop_at=request.last,
        allowed=request.allowed,
        report=report,
        adapt=adapt,
    )


def facts_of(training: Training) -> Facts:
    """Collect the facts of a run on this machine."""
    program = training.program
    return Facts(
        program.hardware,
        training.data.batch_size,
        training.data.plan.unit,
        training.timetable.total,
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.abstract_state)),
        list(training.evaluations),
    )


def require_suitable(training: Training, facts: Facts) -> None:
    """Raise TooLarge if a step takes minutes on CPUs, or the state does not fit into memory."""
    available_bytes = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if 3 * facts.state_bytes > available_bytes:
        raise TooLarge(
            f'the state has {facts.state_bytes / 2**30:.1f} GiB, but only '
            f'{available_bytes / 2**30:.1f} GiB are free'
        )
    shape, program = training.data.shapes[-1], training.program
    step_flops_by_shape = task_flops.step_flops(
        training.run.step.sam, program.model, program.task, shape.spec
    )
    flops = shape.rows * step_flops_by_shape
    if flops > CPU_FLOPS:
        raise TooLarge(f'a step takes {flops:.2g} FLOPs, minutes on CPUs')


def with_all_due(config: ConfigDict) -> ConfigDict:
    """Make everything due after every step, and remove writers."""
    config = copy.deepcopy(config)
    with config.unlocked(), config.ignore_type():
        intervals = config.get('every') or {}
        config.every = {**intervals, 'log': '1 step', 'eval': '1 step', 'checkpoint': '1 step'}
        config.writers = ()
        for section in config.evals.values():
            section.every = None
    return config


def smallest(config: ConfigDict) -> ConfigDict:
    """Set the smallest power of two that the config allows as batch size."""
    sizes = itertools.takewhile(config.batch_size.__gt__, (2**i for i in itertools.count()))
    for size in sizes:
        smaller = copy.deepcopy(config)
        smaller.batch_size = size
        for section in (smaller.data, *smaller.evals.values()):
            if section.get('batch_size'):
                section.batch_size = size
        with contextlib.suppress(UserError):
            build(smaller)
            return smaller
    return config


class FirstBatch:
    """Data that limit evaluations to their first batch."""

    def __init__(self, data: Dataset):
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def eval_batches(self, stopping: Stopping = no_stop) -> Iterator[Batch]:
        """Yield the first batch."""
        return itertools.islice(self._data.eval_batches(stopping), 1)


def with_short_evaluations(training: Training) -> Training:
    """Limit evaluations, and the data that they fit probes to, to one batch each."""
    first_batches: dict[int, Any] = {}

    def short(data: Dataset | None) -> Any:
        return None if data is None else first_batches.setdefault(id(data), FirstBatch(data))

    evaluations = {
        name: dataclasses.replace(
            evaluation, data=short(evaluation.data), fit=short(evaluation.fit)
        )
        for name, evaluation in training.evaluations.items()
    }
    return dataclasses.replace(training, evaluations=evaluations)


if __name__ == '__main__':
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit would wait for the thread that reads standard input
