"""EoMT for panoptic segmentation of COCO: DINOv2 with registers, 640 pixels.

    python -m vit_jax train experiments/eomt/coco_panoptic.py:L \\
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

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

# Blocks with queries, and epochs.
SIZES = {'S': (3, 24), 'B': (3, 24), 'L': (4, 12), 'g': (5, 12)}
IMAGES, BATCH = 118_287, 16


def get_config(size: Literal['S', 'B', 'L', 'g'] = 'L', fast: bool = False) -> ConfigDict:
    """The size of the ViT; `fast` keeps the residual stream in bfloat16."""
    blocks, epochs = SIZES[size]
    steps = epochs * IMAGES // BATCH
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=blocks)
    config.model.update(vit.variant('g-opt/16' if size == 'g' else f'{size}/16'))
    if size == 'g':
        config.model.update(mlp='swiglu', mlp_dim=4096, num_heads=24)
    config.model.update(num_queries=200, layer_scale=1e-5, gelu='erf', registers=4, remat='dots')
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    encoder = 'patch_embed,cls_token,register_tokens,pos_embed,encoder'
    config.init = {'from': placeholder(str), 'select': encoder}

    # Sorted by id, the 80 thing classes come before the 53 stuff classes.
    config.task = dict(name='segment', stuff=tuple(range(80, 133)), points=12_544)
    # Masked attention ends block by block, between the sixth and the five sixths of training.
    starts = [1 + 3 * i / (blocks - 1) for i in range(blocks)]
    config.task.anneal_start = tuple(int(steps * x / 6) for x in starts)
    config.task.anneal_end = tuple(int(steps * (x + 1) / 6) for x in starts)

    keep = "number_masks|keep('image', 'segments', 'labels', 'crowd')"
    config.data = dict(source='panoptic:data/coco', split='train2017')
    config.data.transforms = f'{keep}|flip|large_scale_jitter(640)|pad_objects(100)'
    val = dict(source='panoptic:data/coco', split='val2017', sizes=((640, 640),))
    val.update(transforms="keep('image')|resize_small(640, max=640)")
    val.update(evaluator='panoptic_quality', threshold=0.8, overlap=0.8)
    config.evals = dict(val=val)

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, decay_mask='.', clip_norm=0.01)
    config.optim.layer_decay = 0.8
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup='500 steps')
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', '500 steps', '1000 steps'),)
    config.every = dict(log='50', eval='1 epoch', checkpoint='2000 steps')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=1, num_queries=16)
    config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    config.model.update(dtype='bfloat16', residual_dtype='float32')
    del config.init
    config.task.update(stuff=(10, 11, 12, 13), points=64, anneal_start=(3,), anneal_end=(6,))
    keep = "number_masks|keep('image', 'segments', 'labels')"
    config.data = dict(source='scenes_panoptic:160', split='train')
    config.data.transforms = f'{keep}|flip|large_scale_jitter(32)|pad_objects(7)'
    config.evals.val.update(source='scenes_panoptic:160', split='test[:16]', sizes=((32, 32),))
    config.evals.val.transforms = "keep('image')|resize_small(32, max=32)"
    config.optim.schedule.warmup = '2 steps'
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', '2 steps', '4 steps'),)
    config.every = dict(log='10', eval='20', checkpoint='20')
