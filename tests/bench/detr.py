"""DETR on this CPU, beside PyTorch in the same run.

    python tests/bench/detr.py --image-size 256 --batch-size 2 --rounds 5 --threads 1

The paper's DETR, R50 by default, and `DetrForObjectDetection` of transformers with the same shapes,
SDPA and the losses of all blocks of the decoder: forward, and training steps with AdamW, in which
the root and the first stage of the ResNet have no gradient. Both sides get the same images, with
seven objects each, under the malloc that our commands ask for; dropout is off. How they are run and
timed is told in `cpu.py`.

`--image-size 64 --batch-size 1 --rounds 2` checks the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from cpu import (
    LR,
    REFERENCE,
    WEIGHT_DECAY,
    jax_steps_of,
    measure,
    print_table,
    random_batch,
    record,
    start,
)

from vit_jax.runtime import environment

CLASSES, OBJECTS, FROZEN = 91, 7, 2
# What the step has to reach, as a share of the reference's time.
BARS = {'train': 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='R50')
    parser.add_argument('--image-size', type=int, default=256)
    parser.add_argument('--batch-size', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--json', type=pathlib.Path, help='write all numbers to a file')
    args = parser.parse_args()
    # XLA makes as many threads as there are processors that it may use: before jax is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    kept = {environment.MALLOC_VARIABLE: environment.MALLOC_TUNABLES}
    steps = start(args, torch_steps, kept) | start(args, jax_steps, kept)
    seconds = measure(steps, args.rounds)
    print_table(seconds, BARS)
    if args.json:
        args.json.write_text(json.dumps(record(args, seconds), indent=1) + '\n')


def random_objects(args):
    """Classes, and boxes by corners in pixels."""
    import numpy as np

    rng = np.random.default_rng(1)
    corners = np.sort(rng.uniform(0, args.image_size, (args.batch_size, OBJECTS, 2, 2)), axis=2)
    labels = rng.integers(0, CLASSES, (args.batch_size, OBJECTS))
    return labels, corners.reshape(args.batch_size, OBJECTS, 4).astype(np.float32)


def jax_steps(args) -> dict[str, Callable[[], None]]:
    import numpy as np

    from vit_jax.models import detr
    from vit_jax.tasks import detect

    labels, boxes = random_objects(args)
    batch = {
        'image': random_batch(args)[0],
        'pixel_mask': np.ones((args.batch_size, args.image_size, args.image_size), bool),
        'boxes': boxes,
        'labels': labels.astype(np.int32),
        'object_mask': np.ones(labels.shape, bool),
    }
    fields = {'num_classes': CLASSES, 'dropout': 0.0, 'frozen_stages': FROZEN}
    model = detr.Model(**fields, **detr.variant(args.model))
    return jax_steps_of(model, args, detect.Task(), batch)


def torch_steps(args) -> dict[str, Callable[[], None]]:
    import torch
    import transformers

    from vit_jax.models import detr

    torch.set_num_threads(args.threads)
    backbone = transformers.ResNetConfig(
        depths=list(detr.variant(args.model)['layers']), out_features=['stage4']
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        num_labels=CLASSES,
        dropout=0.0,
        auxiliary_loss=True,
        attn_implementation={'': 'sdpa', 'backbone_config': 'eager'},
    )
    model = transformers.DetrForObjectDetection(config)
    # Transformers lets none of its own ResNet learn.
    for name, parameter in model.model.backbone.named_parameters():
        parameter.requires_grad_('embedder' not in name and 'stages.0' not in name)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LR, weight_decay=WEIGHT_DECAY)
    inputs = torch_inputs(args)

    def forward_step() -> None:
        model.eval()
        with torch.no_grad():
            model(**{name: inputs[name] for name in ('pixel_values', 'pixel_mask')})

    def train_step() -> None:
        model.train()
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {REFERENCE['forward']: forward_step, REFERENCE['train']: train_step}


def torch_inputs(args):
    """Images and objects as transformers takes them."""
    import torch

    images = torch.from_numpy(random_batch(args)[0]).permute(0, 3, 1, 2).contiguous()
    labels, boxes = (torch.from_numpy(array) for array in random_objects(args))
    first, last = boxes[..., :2] / args.image_size, boxes[..., 2:] / args.image_size
    centered = torch.cat([(first + last) / 2, last - first], dim=-1)
    objects = zip(labels, centered, strict=True)
    return {
        'pixel_values': images,
        'pixel_mask': torch.ones(images.shape[0], *images.shape[2:], dtype=torch.long),
        'labels': [{'class_labels': one, 'boxes': box} for one, box in objects],
    }


if __name__ == '__main__':
    main()
