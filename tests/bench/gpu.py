"""Attention, systems and ViTs on an NVIDIA GPU, ViTs beside PyTorch in the same run.

    python tests/bench/gpu.py --json gpu.json

Three tables; `--parts attention` makes one of them:

- attention: the largest relative difference between cuDNN's and XLA's, forward and gradients, and
  the time of both, for the kinds of layers that models have.
- systems: step time, MFU and memory of training B/16, Swin-T, DETR-R50 and SigLIP by the command
  `benchmark`, on all visible GPUs; the compiler's bound by `preflight` on one GPU, where that
  compiles; and the same step in PyTorch on one GPU, by timm or transformers.
- vits: ViT training and inference: timm's ViT, or that of transformers where there is no timm.

Synthetic bytes that already lie on the device, 1,000 classes, bfloat16 computation over float32
parameters, but for DETR, whose recipe computes in float32; a training step is forward, backward,
clipping and AdamW. PyTorch takes autocast to bfloat16, TF32 for what is float32,
`scaled_dot_product_attention`, `torch.compile` and fused AdamW.

Every system and ViT has a process of its own, so that none holds the memory of another. XLA tunes
a step for minutes when it compiles it for the first time: JAX_COMPILATION_CACHE_DIR keeps what it
found, and `--json` what was measured, should the rest be cut off. ViTs need jax, flax and optax,
but none of the packages that read data. On a CPU
    python tests/bench/gpu.py --parts vits --models mu/16 --image-size 32 --batch-size 4 --steps 2 \
        --eager
checks the script itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[n]) for n in (0, 2)]

PARTS = ('attention', 'systems', 'vits')
STEPS = ('forward', 'train')
# Fields of `AttentionSpec`: shape of the queries, keys, heads; then further ones.
ATTENTIONS = {
    'ViT-B/16': ((256, 196, 768), 196, 12, {}),
    'ViT-B/16, class token': ((256, 197, 768), 197, 12, {}),
    'ViT-H/14': ((64, 257, 1280), 257, 16, {}),
    "MAE's visible patches": ((256, 50, 768), 50, 12, {}),
    'NaFlex, packed': ((128, 256, 768), 256, 12, {'segmented': True}),
    'DETR, encoder': ((8, 1764, 256), 1764, 8, {'masked': True}),
    'DETR, cross-attention': ((8, 100, 256), 1764, 8, {'masked': True, 'layout': (1, 2)}),
    'SigLIP, text': ((256, 64, 768), 64, 12, {}),
    'CLIP, text': ((256, 77, 512), 77, 8, {'causal': True}),
    'bias of relative positions': ((64, 197, 768), 197, 12, {'bias_rows': 1}),
}
# Recipes, images on a GPU, and flags for data that have no known sizes.
SYSTEMS = {
    'B/16': ('vit/imagenet2012.py:B/16,300ep,fast', 256, ()),
    'Swin-T': ('swin/imagenet.py:T', 128, ()),
    'DETR-R50': ('detr/coco.py', 8, ()),
    'SigLIP': (
        'siglip/own.py',
        128,
        (
            '--config.data.source=scenes_captions',
            '--config.data.vocab=bytes',
            '--config.model.vocab_size=32000',
        ),
    ),
}
WARMUP = 3
# With a recipe's learning rate PyTorch's DETR diverges from random weights to NaN, and fails.
LR, WEIGHT_DECAY, CLIP_NORM = 1e-9, 0.05, 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--parts', nargs='+', default=PARTS, choices=PARTS)
    parser.add_argument('--systems', nargs='+', default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument('--models', nargs='+', default=['S/16', 'B/16', 'L/16'], help='ViTs')
    parser.add_argument(
        '--libraries', nargs='+', default=['jax', 'torch'], choices=('jax', 'torch')
    )
    parser.add_argument('--batch-size', type=int, default=256, help='of ViTs')
    parser.add_argument('--image-size', type=int, default=224, help='of ViTs')
    parser.add_argument('--batch-of-systems', type=int, help='on each GPU, instead of their own')
    parser.add_argument('--no-bound', action='store_true', help='save the minutes of preflights')
    parser.add_argument('--steps', type=int, default=30)
    parser.add_argument('--eager', action='store_true', help='PyTorch without torch.compile')
    parser.add_argument('--json', help='write all numbers to a file')
    parser.add_argument('--one', nargs=3, metavar=('LIBRARY', 'MODEL', 'STEP'))
    args = parser.parse_args()
    if args.one:
        library, model, step = args.one
        print(json.dumps(MEASURES[library](model, step, args)))
        return
    tables = {'attention': attention_table, 'systems': systems_table, 'vits': vits_table}
    results = {}
    for part in args.parts:
        results[part] = []
        for found in tables[part](args):
            results[part].append(found)
            if args.json:  # what was measured stays if the rest is cut off
                pathlib.Path(args.json).write_text(json.dumps(results, indent=2) + '\n')


def attention_table(args):
    print_row('attention', 'difference', 'cuDNN ms', 'XLA ms')
    print_row(*['---'] * 4)
    for name in ATTENTIONS:
        found = measure_apart('attention', name, 'train')
        if 'error' in found:
            cells = [found['error'], '', '']
        else:
            times = (f'{1e3 * found[k]:.3f}' for k in ('cudnn_sec', 'xla_sec'))
            cells = [f'{found["difference"]:.2%}', *times]
        print_row(name, *cells)
        yield found


def measure_attention(name, step, args):
    """cuDNN's attention and XLA's: difference, and seconds of the result and its gradients."""
    import jax
    import jax.numpy as jnp

    from vit_jax.nn.attention import AttentionSpec, Segments
    from vit_jax.nn.kernels import check, cudnn
    from vit_jax.nn.kernels.interface import Cudnn
    from vit_jax.profiling import benchmark
    from vit_jax.runtime import mesh

    kind = mesh.usable_devices()[0].device_kind
    shape, keys, heads, fields = ATTENTIONS[name]
    spec = AttentionSpec(shape, keys, heads, 'bfloat16', **fields)
    (rows, queries, width), key = shape, jax.random.key(0)
    sizes = [(keys if i else queries, n * width) for i, n in enumerate(spec.layout)]
    projected = [jax.random.normal(key, (rows, *size), jnp.bfloat16) for size in sizes]
    mask = segments = bias = None
    if spec.masked:
        mask = jnp.broadcast_to(jnp.arange(keys) < keys * 3 // 4, (rows, 1, 1, keys))
    if spec.segmented:
        segments = Segments(*[jnp.broadcast_to(1 + jnp.arange(keys) * 3 // keys, (rows, keys))] * 2)
    if spec.bias_rows:
        bias = jax.random.normal(key, (1, heads, queries, keys), jnp.bfloat16)

    def seconds(implementation):
        def total(projected, bias):
            options = (heads, mask, segments, bias, spec.causal, implementation)
            return cudnn.fused_attention(tuple(projected), *options).astype(jnp.float32).sum()

        learned = (0,) if bias is None else (0, 1)
        step = jax.jit(jax.value_and_grad(total, argnums=learned))
        return float(np.median(benchmark.time_calls(lambda: step(projected, bias), args.steps)[1:]))

    return {
        'attention': name,
        'device_kind': kind,
        'difference': check.largest_difference(Cudnn(), spec._replace(shape=(2, *shape[1:]))),
        'cudnn_sec': seconds('cudnn'),
        'xla_sec': seconds('xla'),
    }


def systems_table(args):
    print_row('system', 'batch', 'device', 'ms', 'images/s', 'at most', 'MFU', 'GiB', 'PyTorch ms')
    print_row(*['---'] * 9)
    for name in args.systems:
        found = measure_system(name, args) if 'jax' in args.libraries else {}
        if 'torch' in args.libraries:
            found['torch'] = measure_apart('torch system', name, 'train')
        print_row(name, *system_cells(found))
        yield {'system': name, **found}


def system_cells(found):
    torch = found.get('torch', {'error': '-'})
    beside = torch['error'] if 'error' in torch else f'{1e3 * torch["step_sec"]:.1f}'
    if 'train' not in found:
        return [found.get('error', '-'), *['-'] * 6, beside]
    r, bound = found['train'], found['images_per_sec_bound']
    return [
        f'{r["batch_size"]:,}',
        f'{found["num_devices"]} x {found["device_kind"]}',
        f'{1e3 * r["step_sec"]:.1f}',
        f'{r["images_per_sec"]:,.0f}',
        f'{bound:,.0f}' if bound else '-',
        '-' if r['mfu'] is None else f'{r["mfu"]:.1%}',
        '-' if r['peak_bytes'] is None else f'{r["peak_bytes"] / 2**30:.1f}',
        beside,
    ]


def measure_system(name, args):
    """The numbers of `benchmark`, and the images per second at the bound of `preflight`."""
    recipe, images, flags = SYSTEMS[name]
    images = args.batch_of_systems or images
    config = ('--config', f'experiments/{recipe}', *flags)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / 'timing.json'
        size = f'--config.batch_size={images * visible_gpus()}'
        options = ('--train-only', '--json', str(path), '--steps', str(args.steps))
        done = vit_jax('benchmark', *config, size, *options)
        if done.returncode:
            return {'error': last_line(done.stderr)}
        found = json.loads(path.read_text())
    if args.no_bound:
        return {**found, 'images_per_sec_bound': None}
    kind = found['device_kind']
    return {**found, **bound_of(config, images, kind, found['num_devices'])}


def bound_of(config, images, kind, devices):
    """Images per second at the bound on as many GPUs, if they were one; or why there is none."""
    from vit_jax.profiling import topology

    names = [name for name, gpu in topology.GPUS.items() if gpu.kind == kind]
    if not names:
        return {'images_per_sec_bound': None, 'bound_error': f'preflight does not know {kind}'}
    options = ('--topology', f'{names[0]}:1', '--batch-size', str(images), '--json')
    done = vit_jax('preflight', *config, *options, platform='cpu')
    if done.returncode:
        return {'images_per_sec_bound': None, 'bound_error': last_line(done.stderr)}
    (step,) = json.loads(done.stdout)['steps']
    return {'images_per_sec_bound': devices * step['examples_per_sec_bound'], 'preflight': step}


def vit_jax(*words, platform=None):
    environment = os.environ | ({'JAX_PLATFORMS': platform} if platform else {})
    command = [sys.executable, '-m', 'vit_jax', *words]
    root = pathlib.Path(__file__).resolve().parents[2]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env=environment
    )


def visible_gpus():
    """Number of GPUs of JAX, counted in a process of its own, which gives their memory back."""
    command = [sys.executable, '-c', 'import jax; print(len(jax.local_devices()))']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def last_line(text):
    return (text.strip().splitlines() or ['no reason was printed'])[-1]


def vits_table(args):
    print_row(
        'model', 'step', 'library', 'device', 'ms', 'p10-p90', 'images/s', 'MFU', 'GiB', 'start s'
    )
    print_row(*['---'] * 10)
    for model in args.models:
        for step in STEPS:
            for library in args.libraries:
                found = measure_apart(library, model, step)
                print_result(found)
                yield found


def measure_apart(library, model, step):
    """One measurement in a process of its own; a failure is a result, too."""
    command = [sys.executable, __file__, *sys.argv[1:], '--one', library, model, step]
    whole = os.environ | {'JAX_TRACEBACK_FILTERING': 'off'}  # else the last line is no reason
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=whole)
    about = {'library': library, 'model': model, 'step': step}
    if done.returncode:
        return about | {'error': last_line(done.stderr)}
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

    from torch_systems import CLASSES, LABEL_SMOOTHING

    from vit_jax.config.run import Durations, Optim
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
        adamw = Optim(name='adamw', lr=LR, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM)
        return optim.make_optimizer(params, adamw, Durations(1, 1, 1))[0]

    if step == 'forward':
        timing = benchmark.time_forward(model, task, layout, spec, **sizes)
    else:
        timing = benchmark.time_train(model, task, tx, layout, spec, **sizes)
    environment = benchmark.environment(layout)
    version = environment['versions']['jax']
    return dataclasses.asdict(timing) | environment | {'implementation': f'vit_jax, {version}'}


def measure_torch(name, step, args):
    """The same ViT, batch and step in PyTorch."""
    import torch_systems

    device = torch_device()
    sizes = args.batch_size, args.image_size
    implementation, model, loss = torch_systems.vit(name, *sizes, device)
    first, seconds = torch_seconds(
        torch_step(model.to(device), loss, step, args), args.steps, device
    )
    total, mfu = utilization(name, step, args, float(np.median(seconds)), torch_kind(device))
    timing = torch_timing(args.batch_size, first, seconds, device, implementation)
    return timing | {'flops_per_sec': total / timing['step_sec'], 'mfu': mfu}


def measure_torch_system(name, step, args):
    """A training step of a system in PyTorch, on as many images as on one GPU here."""
    import torch_systems

    device, images = torch_device(), args.batch_of_systems or SYSTEMS[name][1]
    implementation, model, loss = torch_systems.SYSTEMS[name](images, device)
    first, seconds = torch_seconds(
        torch_step(model.to(device), loss, step, args), args.steps, device
    )
    return torch_timing(images, first, seconds, device, implementation)


def torch_device():
    import torch

    torch.set_float32_matmul_precision('high')
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def torch_step(model, loss, step, args):
    """A function without arguments that takes a step with a module's loss."""
    import torch

    compiled = loss if args.eager else torch.compile(loss)
    if step == 'forward':
        model.eval()
        return torch.no_grad()(compiled)
    model.train()
    learned = [p for p in model.parameters() if p.requires_grad]
    fused = next(model.parameters()).is_cuda
    adamw = torch.optim.AdamW(learned, LR, weight_decay=WEIGHT_DECAY, fused=fused)

    def call():
        adamw.zero_grad()
        compiled().backward()
        torch.nn.utils.clip_grad_norm_(learned, CLIP_NORM)
        adamw.step()

    return call


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


def torch_timing(images, first, seconds, device, implementation):
    """Fields of `vit_jax.profiling.benchmark.Timing`, and what was timed."""
    import torch

    median, p10, p90 = (float(np.quantile(seconds, q)) for q in (0.5, 0.1, 0.9))
    return {
        'batch_size': images,
        'compile_sec': max(first - median, 0.0),
        'step_sec': median,
        'step_sec_p10': p10,
        'step_sec_p90': p90,
        'images_per_sec': images / median,
        'peak_bytes': torch.cuda.max_memory_allocated() if device.type == 'cuda' else None,
        'device_kind': torch_kind(device),
        'implementation': f'{implementation}, torch {torch.__version__}',
    }


def torch_kind(device):
    import torch

    return torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'


def utilization(name, step, args, seconds, kind):
    """FLOPs of the step and MFU: the same count for both libraries."""
    os.environ['JAX_PLATFORMS'] = 'cpu'  # only shapes are looked at
    import jax
    from torch_systems import CLASSES

    from vit_jax.models import vit
    from vit_jax.profiling import flops

    model = vit.Model(num_classes=CLASSES, **vit.variant(name))
    image = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, 3), np.float32)
    factor = flops.TRAIN_TO_FORWARD if step == 'train' else 1
    total = factor * args.batch_size * flops.forward_flops(model, image)
    return total, flops.mfu(total, seconds, 1, kind)


MEASURES = {
    'attention': measure_attention,
    'jax': measure_jax,
    'torch': measure_torch,
    'torch system': measure_torch_system,
}


if __name__ == '__main__':
    main()
