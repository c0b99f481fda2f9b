"""Where the seconds of ViT-B/16 go on this CPU, by kind of operation, beside PyTorch's.

    python tests/bench/cpu_ops.py --batch-size 8 --rounds 3 --threads 2

The forward passes and training steps of `cpu.py`, traced by the profilers of JAX and PyTorch, each
library in a process of its own. What runs at the same time on two threads counts once.

`--model mu/16 --image-size 32 --rounds 1` checks the script itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import cpu

from vit_jax.runtime.environment import MALLOC_TUNABLES, MALLOC_VARIABLE

LONGEST = 12
# Names of operations to seconds.
Ops = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ[MALLOC_VARIABLE] = MALLOC_TUNABLES
    spawn = multiprocessing.get_context('spawn')
    for profile in (profile_torch, profile_jax):
        process = spawn.Process(target=profile, args=(args,))
        process.start()
        process.join()


def profile_jax(args) -> None:
    import jax

    from vit_jax.trainer import profile

    @contextlib.contextmanager
    def trace() -> Iterator[Ops]:
        ops: Ops = {}
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                yield ops
            (file,) = pathlib.Path(folder).rglob('*.xplane.pb')
            ops |= profile.read_trace(file).ops

    for name, step in cpu.jax_steps(args).items():
        print_ops(name, step, trace, args.rounds)


def profile_torch(args) -> None:
    import torch

    @contextlib.contextmanager
    def trace() -> Iterator[Ops]:
        ops: Ops = {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            yield ops
        for event in profiler.key_averages():
            ops[event.key] = event.self_cpu_time_total / 1e6

    for name, step in cpu.torch_steps(args).items():
        print_ops(name, step, trace, args.rounds)


def print_ops(name: str, step: Callable[[], None], trace: Callable, rounds: int) -> None:
    """Prints the longest kinds of operation of a step, in seconds."""
    step()  # compiles
    with trace() as ops:
        for _ in range(rounds):
            step()
    seconds = collections.Counter({op: spent / rounds for op, spent in ops.items()})
    print(f'{name}: {seconds.total():.3f} s in operations')
    for op, spent in seconds.most_common(LONGEST):
        print(f'  {op[:56]:56}{spent:8.3f}')


if __name__ == '__main__':
    main()
