"""EoMT for semantic segmentation of Cityscapes: DINOv2 with registers.

    python -m vit_jax train experiments/eomt/cityscapes.py \\
      --config.init.from=hf://facebook/dinov2-with-registers-large --workdir runs/eomt_cityscapes

S, B or L, the default; patches of 14 pixels are resized to 16. leftImg8bit/ and
gtFine/ are unpacked in data/cityscapes; the 19 classes of the benchmark are taken. Scores have the
images' own size.

Kerssies et al., 2025, arXiv:2503.19108, appendix A, and the authors' code: 107 epochs of 16 images
of 1,024 pixels, color distortion, large-scale jitter, AdamW at 1e-4 with layer-wise decay of 0.8.
The heads warm up in 500 steps, then the encoder in 1,000, then both rates decay polynomially.
Evaluation is in windows of the same size.

Expected (published in the authors' model zoo): mIoU 84.2 (L). Not measured. By `preflight`, a
step of L takes 11.1 of 16 GiB and at least 208 ms on v5e:4x4, 20.5 of 59.3 GiB and at least 81 ms
on h100:8; the training at least 18 and 4 chip-hours.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

BLOCKS = {'S': 3, 'B': 3, 'L': 4}  # with queries
IMAGES, EPOCHS, BATCH = 2_975, 107, 16


def get_config(size: Literal['S', 'B', 'L'] = 'L', fast: bool = False) -> ConfigDict:
    """The size of the ViT; `fast` keeps the residual stream in bfloat16."""
    blocks, steps = BLOCKS[size], EPOCHS * IMAGES // BATCH
    config = ConfigDict()
    config.total = f'{EPOCHS} epochs'
    config.batch_size = BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=blocks)
    config.model.update(vit.variant(f'{size}/16'), num_queries=100, layer_scale=1e-5, gelu='erf')
    config.model.update(registers=4, remat='dots')
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    encoder = 'patch_embed,cls_token,register_tokens,pos_embed,encoder'
    config.init = {'from': placeholder(str), 'select': encoder}

    config.task = dict(name='segment', kind='semantic', points=12_544)
    config.task.frame = (1024, 2048)
    # Masked attention ends block by block, between the sixth and the five sixths of training.
    starts = [1 + 3 * i / (blocks - 1) for i in range(blocks)]
    config.task.anneal_start = tuple(int(steps * x / 6) for x in starts)
    config.task.anneal_end = tuple(int(steps * (x + 1) / 6) for x in starts)

    keep = "number_masks|keep('image', 'segments', 'labels')|photometric_distortion|flip"
    data = dict(source='masks:data/cityscapes')
    config.data = dict(data, split='train')
    config.data.transforms = f'{keep}|large_scale_jitter(1024, 0.5, 2.0)|pad_objects(19)'
    data.update(transforms="keep('image')|sliding_windows(1024, most=2)", batch_size=4)
    config.evals = dict(val=dict(data, split='val', evaluator='mean_iou'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, decay_mask='.', clip_norm=0.01)
    config.optim.layer_decay = 0.8
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup='500 steps')
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', '500 steps', '1000 steps'),)
    config.every = dict(log='50', eval='10%', checkpoint='2000 steps')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=1, num_queries=16)
    config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    config.model.update(dtype='bfloat16', residual_dtype='float32')
    del config.init
    config.task.update(points=64, anneal_start=(3,), anneal_end=(6,))
    del config.task.frame
    augment = config.data.transforms.partition('|large_scale_jitter')[0]
    config.data.update(source='scenes_panoptic:160', split='train')
    config.data.transforms = f'{augment}|large_scale_jitter(32, 0.5, 2.0)|pad_objects(7)'
    config.evals.val.update(source='scenes_panoptic:160', split='test[:16]')
    config.evals.val.transforms = "keep('image')|sliding_windows(32, most=6)"
    config.optim.schedule.warmup = '2 steps'
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', '2 steps', '4 steps'),)
    config.every = dict(log='10', eval='20', checkpoint='20')
