"""ViT-B/16 on this CPU, beside PyTorch in the same run.

    python tests/bench/cpu.py --batch-size 8 --rounds 9 --threads 2 --json cpu.json

Float32, images of 224 x 224, 1,000 classes, random weights, the same batch for all. Forward is
inference; a training step is forward, backward and AdamW, here the project's own step with the
norms that it reports. The other side is `ViTForImageClassification` of transformers with
`scaled_dot_product_attention`, under AdamW as torch ships it and under its fused variant. Each side
has a process of its own: vit_jax with the malloc that its commands ask for
(`vit_jax/runtime/environment.py`), torch as it comes, and torch with that malloc too. All take
turns in every round, so that another load on the machine meets each of them alike.

`--xla-flags='--xla_cpu_use_onednn=true'`, any number of times, adds a process of vit_jax with these
flags of XLA.

`--model mu/16 --image-size 32 --rounds 2` checks the script itself.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from vit_jax.runtime.environment import MALLOC_TUNABLES, MALLOC_VARIABLE

CLASSES, LR, WEIGHT_DECAY = 1000, 1e-4, 0.01
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'torch', 'transformers', 'numpy')
REFERENCE = {'forward': 'torch forward', 'train': 'torch train'}
# What the step has to reach, as a share of the reference's time.
BARS = {'forward': 0.95, 'train': 1.0}

# Runs one step in its process and returns its seconds.
Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    parser.add_argument('--xla-flags', action='append', default=[], metavar='FLAGS')
    args = parser.parse_args()
    # XLA makes as many threads as there are processors that it may use: before jax is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    kept = {MALLOC_VARIABLE: MALLOC_TUNABLES}
    steps = {
        **start(args, torch_steps, {}),
        **start(args, torch_steps, kept, ', kept memory'),
        **start(args, jax_steps, kept),
    }
    for flags in args.xla_flags:
        steps |= start(args, jax_steps, {**kept, 'XLA_FLAGS': flags}, f', {flags}')
    seconds = measure(steps, args.rounds)
    print_table(seconds)
    if args.json:
        args.json.write_text(json.dumps(record(args, seconds), indent=1) + '\n')


def start(
    args, make_steps: Callable, environment: dict[str, str], note: str = ''
) -> dict[str, Step]:
    """The steps of `make_steps(args)`, run in a process that starts with `environment`."""
    os.environ.pop(MALLOC_VARIABLE, None)
    os.environ.update(environment)
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context('spawn')
    spawn.Process(target=serve, args=(there, args, make_steps), daemon=True).start()
    there.close()  # so that `recv` fails, and does not wait, where the process has ended

    def remote(name: str) -> Step:
        def step() -> float:
            here.send(name)
            return here.recv()

        return step

    return {name + note: remote(name) for name in here.recv()}


def serve(connection: Connection, args, make_steps: Callable) -> None:
    """Sends the names of the steps; then runs each that it is told, and sends its seconds."""
    steps = make_steps(args)
    connection.send(list(steps))
    while name := connection.recv():
        step = steps[name]
        begin = time.perf_counter()
        step()
        connection.send(time.perf_counter() - begin)


def random_batch(args):
    import numpy as np

    rng = np.random.default_rng(0)
    size = args.image_size
    images = rng.normal(size=(args.batch_size, size, size, 3)).astype(np.float32)
    return images, rng.integers(0, CLASSES, args.batch_size, dtype=np.int32)


def jax_steps(args) -> dict[str, Callable[[], None]]:
    from vit_jax.models import vit

    model = vit.Model(num_classes=CLASSES, gelu='erf', norm_eps=1e-12, **vit.variant(args.model))
    return jax_steps_of(model, args)


def jax_steps_of(model, args, task=None, batch=None) -> dict[str, Callable[[], None]]:
    """Forward and training of one of our models, by default of a classifier on a random batch."""
    import jax

    task, batch, state, train = jax_training(model, args, task, batch)
    apply = jax.jit(lambda params, x: model.apply({'params': params}, *task.inputs(x))['logits'])

    def forward_step() -> None:
        apply(state.params, batch).block_until_ready()

    def train_step() -> None:
        nonlocal state
        state, metrics = train(state, batch)
        jax.block_until_ready((state, metrics))

    return {'vit_jax forward': forward_step, 'vit_jax train': train_step}


def jax_training(model, args, task=None, batch=None) -> tuple:
    """(task, batch, state, compiled step) of training one of our models with AdamW."""
    import jax

    from vit_jax import step
    from vit_jax.config.run import Durations, Optim
    from vit_jax.optim import make as optim
    from vit_jax.runtime import sharding
    from vit_jax.tasks import classify

    jax.config.update('jax_platforms', 'cpu')
    task, layout = task or classify.Task(), sharding.make_layout()
    if batch is None:
        batch = dict(zip(('image', 'label'), random_batch(args), strict=True))
    batch = layout.put_batch(batch)
    abstract = jax.eval_shape(lambda: step.init_variables(model, task, batch, 0))
    adamw = Optim(name='adamw', lr=LR, weight_decay=WEIGHT_DECAY)
    tx, _ = optim.make_optimizer(abstract['params'], adamw, Durations(1, 1, 1))

    def init():
        return step.init_state(step.init_variables(model, task, batch, 0), tx, 0, ema=False)

    state = layout.create(init)
    train = layout.compile_train(step.make_train_step(model, task, tx), jax.eval_shape(init))
    return task, batch, state, train


def torch_steps(args) -> dict[str, Callable[[], None]]:
    import transformers

    from vit_jax.models import vit

    shape = vit.variant(args.model)
    config = transformers.ViTConfig(
        image_size=args.image_size,
        patch_size=shape['patch_size'],
        hidden_size=shape['width'],
        num_hidden_layers=shape['depth'],
        num_attention_heads=shape['num_heads'],
        intermediate_size=shape['mlp_dim'],
        num_labels=CLASSES,
        attn_implementation='sdpa',
    )
    return torch_steps_of(transformers.ViTForImageClassification(config), args)


def torch_steps_of(model, args) -> dict[str, Callable[[], None]]:
    """Forward and training of a classifier of transformers."""
    import torch

    torch.set_num_threads(args.threads)
    images, labels = random_batch(args)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)
    options = {'lr': LR, 'weight_decay': WEIGHT_DECAY}

    def forward_step() -> None:
        model.eval()
        with torch.no_grad():
            model(pixel_values=x)

    def train_step(optimizer) -> Callable[[], None]:
        def step() -> None:
            model.train()
            loss = torch.nn.functional.cross_entropy(model(pixel_values=x).logits, y.long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        REFERENCE['forward']: forward_step,
        REFERENCE['train']: train_step(torch.optim.AdamW(model.parameters(), **options)),
        'torch train, fused AdamW': train_step(
            torch.optim.AdamW(model.parameters(), fused=True, **options)
        ),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step in every round, after one round that compiles and warms up.

    The processes of the steps end with it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            elapsed = step()
            if i:
                seconds[name].append(elapsed)
    for process in multiprocessing.active_children():
        process.terminate()
    return seconds


def ratio(name: str, seconds: dict[str, list[float]]) -> float:
    reference = next(full for kind, full in REFERENCE.items() if kind in name)
    return statistics.median(seconds[name]) / statistics.median(seconds[reference])


def print_table(seconds: dict[str, list[float]], bars: dict[str, float] = BARS) -> None:
    print(f'{"":38}{"median s":>10}{"min":>8}{"max":>8}{"ratio":>8}')
    for name, times in seconds.items():
        row = f'{statistics.median(times):10.3f}{min(times):8.3f}{max(times):8.3f}'
        print(f'{name:38}{row}{ratio(name, seconds):8.3f}')
    for kind, bar in bars.items():
        reached = ratio(f'vit_jax {kind}', seconds)
        print(f'{kind}: {reached:.3f} of the reference, to be at most {bar:.2f}')
    print(f'load of the machine in the last minute: {os.getloadavg()[0]:.1f}')


def record(args, seconds: dict[str, list[float]]) -> dict:
    return {
        'model': args.model,
        'image_size': args.image_size,
        'batch_size': args.batch_size,
        'threads': args.threads,
        'seconds': seconds,
        'ratio': {name: ratio(name, seconds) for name in seconds},
        **machine(PACKAGES),
    }


def machine(packages: Sequence[str]) -> dict:
    """What the numbers depend on."""
    return {
        'versions': {name: importlib.metadata.version(name) for name in packages},
        'python': platform.python_version(),
        'processor': processor(),
        'load': os.getloadavg(),
    }


def processor() -> str:
    """What /proc/cpuinfo calls it, where there is one."""
    info = pathlib.Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor()


if __name__ == '__main__':
    main()
