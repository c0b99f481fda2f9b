"""EoMT for panoptic segmentation of COCO: DINOv2 with registers, 640 pixels.

    python -m vit_jax train --config experiments/eomt/coco_panoptic.py:L \\
      --config.init.from=hf://facebook/dinov2-with-registers-large --workdir runs/eomt_coco

S, B, L or g (dinov2-with-registers-small to -giant); patches of 14 pixels are resized to 16. COCO
2017 is unpacked in data/coco: annotations/panoptic_{train,val}2017.json with the
folders of the same names, train2017/, val2017/.

Kerssies et al., 2025, arXiv:2503.19108, appendix A, and the authors' code: 12 epochs of 16 images,
24 for S and B (`2x`), large-scale jitter, AdamW at 1e-4 with layer-wise decay of 0.8. The heads
warm up in 500 steps, then the encoder in 1,000, then both rates decay polynomially.

Expected (published in the authors' model zoo, panoptic val, 640 pixels): PQ 46.7 (S) and 51.6 (B)
after 24 epochs, 44.7 and 50.6 after 12; 56.0 (L) and 57.0 (g) after 12. Not measured.

By `preflight`, a step of L takes 6.9 of 16 GiB and at least 68 ms on v5e:4x4, 10.2 of 59.3 GiB and
at least 39 ms on h100:8, with 100 segments an image; 12 epochs take at least 27 and 8 chip-hours.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import check_choice
from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

# Blocks with queries, and epochs.
SIZES = {'S': (3, 24), 'B': (3, 24), 'L': (4, 12), 'g': (5, 12)}
ARGS = ('smoke', *SIZES, 'L,fast')
IMAGES, BATCH, SIDE = 118_287, 16, 640
# Sorted by id, the 80 thing classes come before the 53 stuff classes.
STUFF = tuple(range(80, 133))


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: S, B, L or g, and `fast`; `smoke` for a few steps of a tiny model on scenes."""
    arg, dtypes = precision(arg)
    smoke, name = arg == 'smoke', 'S' if arg == 'smoke' else arg or 'L'
    check_choice('coco_panoptic.py', name, tuple(SIZES))
    blocks, epochs = (1, 0) if smoke else SIZES[name]
    steps = 20 if smoke else epochs * IMAGES // BATCH
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 8 if smoke else BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=blocks, **dtypes)
    if smoke:
        config.model.update(num_queries=16, patch_size=8, width=16, depth=2)
        config.model.update(mlp_dim=32, num_heads=2)
    else:
        shape = vit.variant('g-opt/16' if name == 'g' else f'{name}/16')
        config.model.update(shape, num_queries=200, layer_scale=1e-5, gelu='erf', registers=4)
        config.model.update(remat='dots')
        if name == 'g':
            config.model.update(mlp='swiglu', mlp_dim=4096, num_heads=24)
        config.init = {'from': placeholder(str), 'select': ','.join(ENCODER)}

    # Masked attention ends block by block, between the sixth and the five sixths of training.
    config.task = dict(name='segment', stuff=(10, 11, 12, 13) if smoke else STUFF)
    config.task.points = 64 if smoke else 12_544
    starts = [1 + 3 * i / max(blocks - 1, 1) for i in range(blocks)]
    config.task.anneal_start = tuple(int(steps * x / 6) for x in starts)
    config.task.anneal_end = tuple(int(steps * (x + 1) / 6) for x in starts)

    source = 'scenes_panoptic:160' if smoke else 'panoptic:data/coco'
    side, count = (32, 7) if smoke else (SIDE, 100)
    fields = "'image', 'segments', 'labels'" + ('' if smoke else ", 'crowd'")
    keep = f'number_masks|keep({fields})'
    config.data = dict(source=source, split='train' if smoke else 'train2017')
    config.data.transforms = f'{keep}|flip|large_scale_jitter({side})|pad_objects({count})'
    seen = f"keep('image')|resize_small({side}, max={side})"
    val = dict(source=source, split='test[:16]' if smoke else 'val2017', sizes=((side, side),))
    quality = dict(val, transforms=seen, evaluator='panoptic_quality', threshold=0.8, overlap=0.8)
    config.evals = dict(val=quality)

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, decay_mask='.', clip_norm=0.01)
    config.optim.layer_decay = 0.8
    first, second = ('2 steps', '4 steps') if smoke else ('500 steps', '1000 steps')
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup=first)
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', first, second),)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '2000 steps'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
