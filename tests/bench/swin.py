"""Swin on this CPU: beside PyTorch, or the two models of experiments/swin/cifar10.py.

    python tests/bench/swin.py --batch-size 8 --rounds 7 --threads 2 --json swin.json
    python tests/bench/swin.py --against vit --batch-size 64 --rounds 20 --threads 1

The other side is `SwinForImageClassification` of transformers with the same shapes, fed the same
images, under the malloc that our commands ask for; how both are run and timed is told in `cpu.py`.
Stochastic depth is off on both sides. With `--against vit` the Swin and the ViT that learn CIFAR-10
train in turns, on images of 32 pixels.

`--model mu --image-size 56 --rounds 2` checks the script itself; transformers takes no map that is
smaller than a window.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import statistics
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cpu import CLASSES, jax_steps_of, measure, print_table, record, start, torch_steps_of

from vit_jax.runtime import environment

EXPERIMENT = pathlib.Path(__file__).resolve().parents[2] / 'experiments/swin/cifar10.py'
# What the step has to reach, as a share of the reference's time.
BARS = {'train': 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--against', choices=('torch', 'vit'), default='torch')
    parser.add_argument('--model', default='T')
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    args = parser.parse_args()
    # XLA makes as many threads as there are processors that it may use: before jax is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    kept = {environment.MALLOC_VARIABLE: environment.MALLOC_TUNABLES}
    if args.against == 'vit':
        args.image_size = 32
        steps = start(args, swin_of_cifar10, kept) | start(args, vit_of_cifar10, kept)
        print_rates(measure(steps, args.rounds), args.batch_size)
        return
    steps = start(args, torch_steps, kept) | start(args, jax_steps, kept)
    seconds = measure(steps, args.rounds)
    print_table(seconds, BARS)
    if args.json:
        args.json.write_text(json.dumps(record(args, seconds), indent=1) + '\n')


def jax_steps(args) -> dict[str, Callable[[], None]]:
    from vit_jax.models import swin

    return jax_steps_of(swin.Model(num_classes=CLASSES, **swin.variant(args.model)), args)


def torch_steps(args) -> dict[str, Callable[[], None]]:
    import transformers

    from vit_jax.models import swin

    shape = swin.variant(args.model)
    config = transformers.SwinConfig(
        image_size=args.image_size,
        embed_dim=shape['width'],
        depths=list(shape['depths']),
        num_heads=list(shape['num_heads']),
        window_size=shape['window'],
        drop_path_rate=0.0,
        num_labels=CLASSES,
        attn_implementation='sdpa',
    )
    return torch_steps_of(transformers.SwinForImageClassification(config), args)


def swin_of_cifar10(args) -> dict[str, Callable[[], None]]:
    return of_cifar10('swin', args)


def vit_of_cifar10(args) -> dict[str, Callable[[], None]]:
    return of_cifar10('vit', args)


def of_cifar10(name: str, args) -> dict[str, Callable[[], None]]:
    """The training step of one of the two models."""
    from vit_jax.models import swin, vit

    fields = dict(runpy.run_path(str(EXPERIMENT))['MODELS'][name], num_classes=CLASSES)
    model = {'swin': swin, 'vit': vit}[fields.pop('name')].Model(**fields)
    return {name: jax_steps_of(model, args)['vit_jax train']}


def print_rates(seconds: dict[str, list[float]], batch_size: int) -> None:
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f'{name:6}{1000 * middle:8.1f} ms a step{batch_size / middle:8.0f} images/s')
    print(f'load of the machine in the last minute: {os.getloadavg()[0]:.1f}')


if __name__ == '__main__':
    main()
