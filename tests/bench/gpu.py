"""ViT training and inference on an accelerator, beside PyTorch in the same run.

    python tests/bench/gpu.py --models S/16 B/16 L/16 --batch-size 256 --json gpu.json

Synthetic bytes that already lie on the device, 1,000 classes, bfloat16 computation over
float32 parameters; a training step is forward, backward, clipping and AdamW. The other
side is timm's ViT, or that of transformers where there is no timm: autocast to bfloat16,
`scaled_dot_product_attention`, `torch.compile`, fused AdamW. Every measurement has a
process of its own, so that neither library holds the memory of the other.

Needs jax, flax and optax, but none of the packages that read data. On a CPU
    python tests/bench/gpu.py --models mu/16 --image-size 32 --batch-size 4 --steps 2 --eager
checks the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

STEPS = ('forward', 'train')
WARMUP = 3
CLASSES, LABEL_SMOOTHING, LR, WEIGHT_DECAY, CLIP_NORM = 1000, 0.1, 1e-3, 0.05, 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', default=['S/16', 'B/16', 'L/16'])
    parser.add_argument('--libraries', nargs='+', default=['jax', 'torch'], choices=MEASURES)
    parser.add_argument('--batch-size', type=int, default=256)
    parser.add_argument('--image-size', type=int, default=224)
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('--eager', action='store_true', help='PyTorch without torch.compile')
    parser.add_argument('--json', help='write all numbers to a file')
    parser.add_argument('--one', nargs=3, metavar=('LIBRARY', 'MODEL', 'STEP'))
    args = parser.parse_args()
    if args.one:
        library, model, step = args.one
        print(json.dumps(MEASURES[library](model, step, args)))
        return
    results = []
    print_row(
        'model', 'step', 'library', 'device', 'ms', 'p10-p90', 'images/s', 'MFU', 'GiB', 'start s'
    )
    print_row(*['---'] * 10)
    for model in args.models:
        for step in STEPS:
            for library in args.libraries:
                results.append(measure_apart(library, model, step))
                print_result(results[-1])
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=2) + '\n')


def measure_apart(library, model, step):
    """One measurement in a process of its own; a failure is a result, too."""
    command = [sys.executable, __file__, *sys.argv[1:], '--one', library, model, step]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    about = {'library': library, 'model': model, 'step': step}
    if done.returncode:
        return about | {'error': done.stderr.strip().splitlines()[-1]}
    return about | json.loads(done.stdout.splitlines()[-1])


def print_row(*cells):
    print('| ' + ' | '.join(cells) + ' |', flush=True)


def print_result(r):
    if 'error' in r:
        print_row(r['model'], r['step'], r['library'], r['error'], *['-'] * 6)
        return
    ms, p10, p90 = (f'{1e3 * r[k]:.2f}' for k in ('step_sec', 'step_sec_p10', 'step_sec_p90'))
    mfu = '-' if r['mfu'] is None else f'{r["mfu"]:.1%}'
    memory = '-' if r['peak_bytes'] is None else f'{r["peak_bytes"] / 2**30:.1f}'
    numbers = f'{r["images_per_sec"]:,.0f}', mfu, memory, f'{r["compile_sec"]:.0f}'
    name = f'{r["library"]} ({r["implementation"]})'
    print_row(r['model'], r['step'], name, r['device_kind'], ms, f'{p10}-{p90}', *numbers)


def measure_jax(name, step, args):
    """This package: the steps that `train` and `evaluate` compile."""
    import dataclasses

    from vit_jax.models import vit
    from vit_jax.optim import make as optim
    from vit_jax.profiling import benchmark
    from vit_jax.runtime import sharding
    from vit_jax.tasks import classify

    model = vit.Model(num_classes=CLASSES, dtype='bfloat16', **vit.variant(name))
    task = classify.Task(label_smoothing=LABEL_SMOOTHING)
    layout = sharding.make_layout()
    spec = benchmark.image_spec(args.image_size)
    sizes = {'batch_size': args.batch_size, 'steps': args.steps}

    def tx(params):
        options = {'weight_decay': WEIGHT_DECAY, 'clip_norm': CLIP_NORM}
        return optim.make(params, 1, int, name='adamw', lr=LR, **options)[0]

    if step == 'forward':
        timing = benchmark.time_forward(model, task, layout, spec, **sizes)
    else:
        timing = benchmark.time_train(model, task, tx, layout, spec, **sizes)
    environment = benchmark.environment(layout)
    version = environment['versions']['jax']
    return dataclasses.asdict(timing) | environment | {'implementation': f'vit_jax, {version}'}


def measure_torch(name, step, args):
    """The same model, batch and step in PyTorch."""
    import torch

    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.set_float32_matmul_precision('high')
    rng = np.random.default_rng(0)
    shape = args.batch_size, 3, args.image_size, args.image_size
    images = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, CLASSES, args.batch_size)).to(device)
    implementation, model = torch_vit(name, args.image_size)
    model = model.to(device)

    def loss(images, labels):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(images.float() / 127.5 - 1)
        smoothing = LABEL_SMOOTHING if model.training else 0.0
        return torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing)

    compiled = loss if args.eager else torch.compile(loss)
    if step == 'forward':
        model.eval()
        call = torch.no_grad()(lambda: compiled(images, labels))
    else:
        fused = device.type == 'cuda'
        adamw = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY, fused=fused)

        def call():
            adamw.zero_grad()
            compiled(images, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            adamw.step()

    first, seconds = torch_seconds(call, args.steps, device)
    return summary(name, step, args, first, seconds, device) | {
        'implementation': f'{implementation}, torch {torch.__version__}'
    }


def torch_vit(name, image_size):
    """The implementation's name, and a module from images to logits."""
    import torch

    from vit_jax.models import vit

    v = vit.variant(name)
    with contextlib.suppress(ImportError):
        import timm
        from timm.models.vision_transformer import VisionTransformer

        return f'timm {timm.__version__}', VisionTransformer(
            img_size=image_size,
            patch_size=v['patch_size'],
            num_classes=CLASSES,
            embed_dim=v['width'],
            depth=v['depth'],
            num_heads=v['num_heads'],
            mlp_ratio=v['mlp_dim'] / v['width'],
        )
    import transformers

    config = transformers.ViTConfig(
        hidden_size=v['width'],
        num_hidden_layers=v['depth'],
        num_attention_heads=v['num_heads'],
        intermediate_size=v['mlp_dim'],
        image_size=image_size,
        patch_size=v['patch_size'],
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation='sdpa',
    )

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = transformers.ViTForImageClassification(config)

        def forward(self, images):
            return self.vit(images).logits

    return f'transformers {transformers.__version__}', Logits()


def torch_seconds(call, steps, device):
    """Seconds of the first call, and of each of `steps` calls after a warm-up."""
    import torch

    def synchronize():
        if device.type == 'cuda':
            torch.cuda.synchronize()

    began = time.perf_counter()
    call()
    synchronize()
    first = time.perf_counter() - began
    for _ in range(WARMUP):
        call()
    if device.type == 'cpu':
        ends = [time.perf_counter()]
        for _ in range(steps):
            call()
            ends.append(time.perf_counter())
        return first, np.diff(ends)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for i, event in enumerate(events):
        if i:
            call()
        event.record()
    synchronize()
    return first, np.array([a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)])


def summary(name, step, args, first, seconds, device):
    """The fields of `vit_jax.profiling.benchmark.Timing`."""
    import torch

    median, p10, p90 = (float(np.quantile(seconds, q)) for q in (0.5, 0.1, 0.9))
    cuda = device.type == 'cuda'
    kind = torch.cuda.get_device_name() if cuda else 'cpu'
    total, mfu = utilization(name, step, args, median, kind)
    return {
        'batch_size': args.batch_size,
        'compile_sec': max(first - median, 0.0),
        'step_sec': median,
        'step_sec_p10': p10,
        'step_sec_p90': p90,
        'images_per_sec': args.batch_size / median,
        'flops_per_sec': total / median,
        'mfu': mfu,
        'peak_bytes': torch.cuda.max_memory_allocated() if cuda else None,
        'device_kind': kind,
    }


def utilization(name, step, args, seconds, kind):
    """FLOPs of the step and MFU: the same count for both libraries."""
    os.environ['JAX_PLATFORMS'] = 'cpu'  # only shapes are looked at
    import jax

    from vit_jax.models import vit
    from vit_jax.profiling import flops

    model = vit.Model(num_classes=CLASSES, **vit.variant(name))
    image = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, 3), np.float32)
    factor = flops.TRAIN_TO_FORWARD if step == 'train' else 1
    total = factor * args.batch_size * flops.forward_flops(model, image)
    return total, flops.mfu(total, seconds, 1, kind)


MEASURES = {'jax': measure_jax, 'torch': measure_torch}


if __name__ == '__main__':
    main()
