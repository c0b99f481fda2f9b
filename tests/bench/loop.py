"""The host's time for a step of the training loop, beside that of the compiled step alone.

    python tests/bench/loop.py --steps 500 --rounds 10

A linear classifier of digits, or another config by `--config FILE`, on one device: almost all of a
small model's step is the host's work. `step` calls the compiled step on a batch that is on the
device, and waits for the loss of the step before the last; `bare` also hands it over from the
host; `loop` is a whole run on it that logs every 50 steps, with neither evaluations nor saves
among the steps measured; `data` is the same run on batches that are made of the data, of digits in
memory by `pad_and_crop(1)`. They take turns in every round, in reversed order in every other one.
Numbers are milliseconds a step, the lowest of all rounds: `wall` by the clock, `thread` CPU time
of the thread of the loop, `process` that of all threads, the devices' included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from helpers import linear

from vit_jax.config import load
from vit_jax.trainer.build import Training, build
from vit_jax.trainer.train import train

WARM = 100  # steps before those that are measured, and after them
CLOCKS = {'wall': time.perf_counter, 'thread': time.thread_time, 'process': time.process_time}


class Timed:
    """The data of a run, with its own batches or, if `constant`, the first one again and again.

    Attributes:
      spent: seconds of each clock for the steps between the first and last WARM ones.
    """

    def __init__(self, data: Any, steps: int, constant: bool):
        self._data, self._steps, self._constant = data, steps, constant
        self.spent: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_batches(self, start: int, *_: object) -> Iterator[Any]:
        del start
        with contextlib.closing(self._data.train_batches(0)) as made:
            yield from self._clocked(itertools.repeat(next(made)) if self._constant else made)

    def _clocked(self, batches: Iterator[Any]) -> Iterator[Any]:
        for i, batch in enumerate(batches):
            if i == WARM:
                began = {name: clock() for name, clock in CLOCKS.items()}
            elif i == WARM + self._steps:
                self.spent = {name: clock() - began[name] for name, clock in CLOCKS.items()}
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=500)
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    parser.add_argument('--config', metavar='FILE', help='by default the linear classifier')
    args = parser.parse_args()
    made = prepare(args.steps, args.config)
    fixed = dataclasses.replace(made, data=Timed(made.data._data, args.steps, constant=True))
    sides = {
        'step': (time_step, fixed),
        'bare': (time_bare, fixed),
        'loop': (time_loop, fixed),
        'data': (time_loop, made),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            side, training = sides[name]
            spent = side(training)
            if number:  # the first round compiles
                found[name].append({k: 1e3 * v / args.steps for k, v in spent.items()})
    print_table(found)
    if args.json:
        args.json.write_text(json.dumps({'environment': environment(), **found}, indent=1) + '\n')


def prepare(steps: int, file: str | None) -> Training:
    """The run, whose data are timed."""
    config = load.load(file) if file else linear.get_config()
    config.unlock()
    config.total = f'{steps + 2 * WARM} steps'
    config.every = ConfigDict(
        {'log': '50', 'eval': '1000000', 'checkpoint': '1000000', 'examples': ''}
    )
    config.evals, config.writers = ConfigDict(), ()
    config = load.from_json(load.to_json(config))
    training = build(config, jax.devices()[:1])
    return dataclasses.replace(training, data=Timed(training.data, steps, constant=False))


def time_step(training: Training) -> dict[str, float]:
    """On the first batch, put on the device once."""
    placed = None

    def put(batch: Any) -> Any:
        nonlocal placed
        placed = placed or training.program.layout.put_batch(batch)
        return placed

    return time_bare(training, put)


def time_bare(training: Training, put: Callable[[Any], Any] | None = None) -> dict[str, float]:
    program, data = training.program, training.data
    put = put or program.layout.feed
    state, waiting = program.layout.create(program.init, {}), []
    for batch in itertools.islice(data.train_batches(0), training.timetable.total):
        state, metrics = program.train_step(state, put(batch))
        waiting.append(metrics['loss'])
        if len(waiting) > 2:
            np.asarray(waiting.pop(0))
    return dict(data.spent)


def time_loop(training: Training) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(training.config, folder, devices=jax.devices()[:1], adapt=lambda _: training)
    return dict(training.data.spent)


def environment() -> str:
    packages = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'rich'))
    model = next(
        (
            line.partition(':')[2].strip()
            for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines()
            if line.startswith('model name')
        ),
        'unknown CPU',
    )
    return f'{model}, Python {sys.version.split()[0]}, {packages}'


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    """Print the lowest of all rounds, as other work only adds to them, and the difference."""
    print(environment())
    print('| ms a step | ' + ' | '.join(CLOCKS) + ' |\n|---|' + '---|' * len(CLOCKS))
    lowest = {name: {k: min(r[k] for r in found[name]) for k in CLOCKS} for name in found}
    for more, less in (('bare', 'step'), ('loop', 'bare'), ('data', 'loop')):
        lowest[f'{more} - {less}'] = {k: lowest[more][k] - lowest[less][k] for k in CLOCKS}
    for name, row in lowest.items():
        print(f'| {name} | ' + ' | '.join(f'{row[k]:.3f}' for k in CLOCKS) + ' |')


if __name__ == '__main__':
    main()
