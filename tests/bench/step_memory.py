"""Peak memory of a training step on this CPU, beside PyTorch's.

    python tests/bench/step_memory.py --models B/16 L/16 JiT-B/16 --batch-size 8

Float32 and AdamW, as in `cpu.py`. Each side has a process of its own, which makes its parameters
and their optimizer's state and runs two steps. Its peak is the highest resident memory, without
that before the model was made; the compiler's account of the same step stands beside it: the state,
what the step makes for a while, and what of its results is a copy rather than the state's own
buffers. PyTorch has no JiT.

`--models mu/16 --image-size 32` checks the script itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import resource
import sys
from multiprocessing.connection import Connection

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import cpu
import numpy as np

JIT, JIT_SIZE = 'JiT-', 256
Sizes = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', default=['B/16', 'L/16', 'JiT-B/16'])
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    for name in args.models:
        args.model = name
        sides = [measure_jax] if args.model.startswith(JIT) else [measure_torch, measure_jax]
        for side in sides:
            sizes = in_a_process(side, args)
            figures = ', '.join(f'{kind} {size:.2f}' for kind, size in sizes.items())
            print(f'{name:10}{side.__name__.partition("_")[2]:6}GiB: {figures}', flush=True)


def in_a_process(measure, args) -> Sizes:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context('spawn').Process(target=measure, args=(there, args))
    process.start()
    there.close()  # so that `recv` fails, and does not wait, where the process has ended
    sizes = here.recv()
    process.join()
    return sizes


def measure_torch(connection: Connection, args) -> None:
    steps = cpu.torch_steps(args)  # imports torch, and makes the parameters
    parameters = sum(x.numel() * 4 for x in _parameters(steps))
    before = peak_gib() - parameters / 2**30
    for _ in range(2):
        steps['torch train, fused AdamW']()
    connection.send({'peak': peak_gib() - before})


def _parameters(steps):
    """The parameters of the module in the closure of the steps."""
    step = steps[cpu.REFERENCE['forward']]
    cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    return cells['model'].cell_contents.parameters()


def measure_jax(connection: Connection, args) -> None:
    import jax

    model, task, batch = jit_parts(args) if args.model.startswith(JIT) else vit_parts(args)
    jax.devices()
    before = peak_gib()
    _, batch, state, train = cpu.jax_training(model, args, task, batch)
    compiled = train.lower(state, batch).compile()
    for _ in range(2):
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
    account = compiled.memory_analysis()
    connection.send(
        {
            'peak': peak_gib() - before,
            'state and batch': account.argument_size_in_bytes / 2**30,
            'temporary': account.temp_size_in_bytes / 2**30,
            'copies': (account.output_size_in_bytes - account.alias_size_in_bytes) / 2**30,
        }
    )


def vit_parts(args):
    from vit_jax.models import vit

    model = vit.Model(
        num_classes=cpu.CLASSES, gelu='erf', norm_eps=1e-12, **vit.variant(args.model)
    )
    return model, None, None


def jit_parts(args):
    """A JiT that makes images of 1,000 classes, as `experiments/jit/imagenet.py` trains it."""
    from vit_jax.models import jit
    from vit_jax.tasks import generate

    model = jit.Model(num_classes=cpu.CLASSES, **jit.variant(args.model.removeprefix(JIT)))
    rng = np.random.default_rng(0)
    shape = args.batch_size, JIT_SIZE, JIT_SIZE, 3
    batch = {
        'image': rng.integers(0, 256, shape, np.uint8),
        'label': rng.integers(0, cpu.CLASSES, args.batch_size, dtype=np.int32),
    }
    return model, generate.Task(), batch


def peak_gib() -> float:
    """The highest resident memory of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == '__main__':
    main()
