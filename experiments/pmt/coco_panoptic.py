"""PMT for panoptic segmentation of COCO: a frozen DINOv3, 640 pixels.

    python -m vit_jax train experiments/pmt/coco_panoptic.py:L \\
      --config.init.from=hf://facebook/dinov3-vitl16-pretrain-lvd1689m --workdir runs/pmt_coco

S, B or L (dinov3-vits16-, -vitb16- and -vitl16-pretrain-lvd1689m). COCO 2017 is unpacked in
data/coco: annotations/panoptic_{train,val}2017.json with the folders of the same names, train2017/,
val2017/.

Cavagnero et al., 2026, arXiv:2603.25398, and the authors' code: 12 epochs of 16 images, large-scale
jitter, AdamW at 2e-4 for the decoder, warm-up in 6,000 steps, then a cosine. L takes the authors
about 6 hours on 4 H100.

Expected (published in the authors' model zoo, panoptic val, 640 pixels): PQ 45.3 (S), 52.8 (B),
56.1 (L). Not measured.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

IMAGES, EPOCHS, BATCH, BLOCKS = 118_287, 12, 16, 6


def get_config(size: Literal['S', 'B', 'L'] = 'L', fast: bool = False) -> ConfigDict:
    """The size of the ViT; `fast` keeps the residual stream in bfloat16."""
    steps = EPOCHS * IMAGES // BATCH
    config = ConfigDict()
    config.total = f'{EPOCHS} epochs'
    config.batch_size = BATCH

    config.model = dict(name='pmt', num_classes=placeholder(int), **vit.variant(f'{size}/16'))
    config.model.update(posemb='none', positions='rope_dinov3(rescale=2.0)', no_bias='key')
    config.model.update(layer_scale=1e-5, gelu='erf', norm_eps=1e-5, registers=4)
    config.model.update(query_blocks=BLOCKS, num_queries=200, remat='dots')
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    encoder = 'patch_embed,cls_token,register_tokens,encoder'
    config.init = {'from': placeholder(str), 'select': encoder}

    # Sorted by id, the 80 thing classes come before the 53 stuff classes.
    config.task = dict(name='segment', stuff=tuple(range(80, 133)), points=12_544)
    # Masked attention ends at once in the first block, and in the others one by one, each within a
    # sixth of training.
    starts = [steps * (4 / 15 + i / 10) for i in range(BLOCKS - 1)]
    config.task.anneal_start = (0, *map(int, starts))
    config.task.anneal_end = (3_000, *(int(start + steps / 6) for start in starts))

    keep = "number_masks|keep('image', 'segments', 'labels', 'crowd')"
    config.data = dict(source='panoptic:data/coco', split='train2017')
    config.data.transforms = f'{keep}|flip|large_scale_jitter(640)|pad_objects(100)'
    val = dict(source='panoptic:data/coco', split='val2017', sizes=((640, 640),))
    val.update(transforms="keep('image')|resize_small(640, max=640)")
    val.update(evaluator='panoptic_quality', threshold=0.8, overlap=0.8)
    config.evals = dict(val=val)

    config.optim = dict(name='adamw', lr=2e-4, weight_decay=0.05, decay_mask='.', clip_norm=0.01)
    config.optim.schedule = dict(name='cosine', warmup='6000 steps')
    config.optim.freeze = (f'^({"|".join(ENCODER)})(/|$)',)
    config.every = dict(log='50', eval='1 epoch', checkpoint='2000 steps')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model = dict(name='pmt', num_classes=placeholder(int), query_blocks=1, num_queries=16)
    config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    config.model.update(posemb='none', positions='rope_dinov3')
    config.model.update(dtype='bfloat16', residual_dtype='float32')
    del config.init
    config.task.update(stuff=(10, 11, 12, 13), points=64, anneal_start=(3,), anneal_end=(6,))
    keep = "number_masks|keep('image', 'segments', 'labels')"
    config.data = dict(source='scenes_panoptic:160', split='train')
    config.data.transforms = f'{keep}|flip|large_scale_jitter(32)|pad_objects(7)'
    config.evals.val.update(source='scenes_panoptic:160', split='test[:16]', sizes=((32, 32),))
    config.evals.val.transforms = "keep('image')|resize_small(32, max=32)"
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
