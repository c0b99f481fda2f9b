"""Training steps of the Transformer and of the LSTM that translate, on this CPU in one run.

    python tests/bench/seq2seq.py --lengths 16 32 64 128 --threads 1 2 --json seq2seq.json

Both models, their losses and optimizers are those of experiments/translate/multi30k.py; a step is
the one that the trainer compiles. Source and target have the same number of random tokens, so many
rows as make `--tokens` a side, and no padding. Every model has a process of its own for each number
of threads, and all take turns in every round.

`--lengths 4 --tokens 16 --threads 1 --rounds 1` checks the script itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cpu import machine, measure, start

from vit_jax.runtime import environment

EXPERIMENT = pathlib.Path(__file__).resolve().parents[2] / 'experiments/translate/multi30k.py'
MODELS = ('transformer', 'lstm')
VOCAB_SIZE = 4000
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--lengths', type=int, nargs='+', default=[16, 32, 64, 128])
    parser.add_argument('--tokens', type=int, default=2048, help='of a batch, on one side')
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    args = parser.parse_args()
    processors, steps = sorted(os.sched_getaffinity(0)), {}
    for threads in args.threads:
        # XLA makes as many threads as there are processors that it may use: before jax is imported.
        os.sched_setaffinity(0, processors[:threads])
        for model in MODELS:
            args.model, args.process_threads = model, threads
            steps |= start(
                args, train_steps, {environment.MALLOC_VARIABLE: environment.MALLOC_TUNABLES}
            )
    seconds = measure(steps, args.rounds)
    result = record(args, seconds)
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + '\n')


def name_of(model: str, threads: int, length: int) -> str:
    return f'{model}, {length} tokens, {threads} thread{"s" if threads > 1 else ""}'


def train_steps(args) -> dict[str, Callable[[], None]]:
    import jax

    from vit_jax import step
    from vit_jax.config import load
    from vit_jax.config.run import Durations, Schedule
    from vit_jax.optim import make as optim
    from vit_jax.runtime import sharding

    jax.config.update('jax_platforms', 'cpu')
    config = load.load(f'{EXPERIMENT}:{args.model}')
    config.model.vocab_size = VOCAB_SIZE
    model, task = load.model_and_task(config)
    layout = sharding.make_layout()
    one = random_batch(args.lengths[0], args.lengths[0])
    abstract = jax.eval_shape(lambda: step.init_variables(model, task, one, 0))
    constant = dataclasses.replace(load.to_run(config).optim, schedule=Schedule())
    tx, _ = optim.make_optimizer(abstract['params'], constant, Durations(1, 1, 1))

    def init():
        return step.init_state(step.init_variables(model, task, one, 0), tx, 0, ema=False)

    state = layout.create(init)
    train = layout.compile_train(step.make_train_step(model, task, tx), jax.eval_shape(init))

    def make(length: int) -> Callable[[], None]:
        batch = layout.put_batch(random_batch(length, args.tokens))

        def run() -> None:
            nonlocal state
            state, metrics = train(state, batch)
            jax.block_until_ready((state, metrics))

        return run

    return {name_of(args.model, args.process_threads, n): make(n) for n in args.lengths}


def random_batch(length: int, tokens: int):
    import numpy as np

    draw = np.random.default_rng(0).integers
    shape = tokens // length, length
    return {side: draw(4, VOCAB_SIZE, shape, dtype=np.int32) for side in ('source', 'target')}


def record(args, seconds: dict[str, list[float]]) -> dict:
    return {
        'tokens': args.tokens,
        'seconds': seconds,
        'tokens_per_second': {
            name: args.tokens / statistics.median(times) for name, times in seconds.items()
        },
        'lengths': args.lengths,
        'threads': args.threads,
        **machine(PACKAGES),
    }


def print_table(result: dict) -> None:
    print('target tokens a second in training')
    print(f'{"":24}' + ''.join(f'{name:>14}' for name in MODELS) + f'{"ratio":>8}')
    for threads in result['threads']:
        for length in result['lengths']:
            rates = [result['tokens_per_second'][name_of(m, threads, length)] for m in MODELS]
            shown = ''.join(f'{rate:14,.0f}' for rate in rates)
            print(f'{name_of("", threads, length)[2:]:24}{shown}{rates[0] / rates[1]:8.2f}')
    print(f'load of the machine in the last minute: {result["load"][0]:.1f}')


if __name__ == '__main__':
    main()
