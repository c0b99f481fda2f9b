"""EoMT on `scenes_panoptic`, digits on four kinds of textures: panoptic segmentation, no download.

    python -m vit_jax train --config experiments/eomt/scenes.py --workdir runs/eomt_scenes
    python -m vit_jax train --config experiments/eomt/scenes.py:vit_s14 \\
      --config.init.from=FOLDER --workdir runs/eomt_vit_s14

In one stage, where detr/scenes_panoptic.py needs three. `:vit_s14` starts from a DINOv2 ViT-S/14;
an image takes five times as long, so that it sees a fifth as many.

Expected: PQ of at least 0.647 on the 500 test images, that of panoptic DETR after about 134 minutes
of one CPU core. Measured with `:vit_s14`: PQ 0.823 (SQ 0.852, RQ 0.964; things 0.759, stuff 0.982)
after 55 minutes of CPU time of an Intel Xeon; 0.315, 0.715 and 0.798 after a quarter, a half and
three quarters of the steps. From scratch: PQ 0.617 (SQ 0.872, RQ 0.689; things 0.468, stuff 0.990)
after about 62 minutes of CPU time, below DETR's and in half its time; 0.283, 0.424 and 0.574 on the
way. One seed each; the test images chose nothing.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

ARGS = ('smoke', 'vit_s14')
COUNT = 10_000
TEXTURES = (10, 11, 12, 13)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `vit_s14` to start from a ViT, `smoke` for a few steps of a tiny model."""
    smoke, pretrained = arg == 'smoke', arg == 'vit_s14'
    config = ConfigDict()
    config.seed = 0
    steps = 20 if smoke else 2_000 if pretrained else 10_000
    config.total = f'{steps} steps'
    config.batch_size = 8

    config.model = dict(name='eomt', num_classes=placeholder(int), num_queries=16)
    if smoke:
        config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2, upscale=1)
    elif pretrained:
        config.model.update(vit.variant('S/14'), layer_scale=1e-5, gelu='erf', upscale=2)
    else:
        config.model.update(patch_size=8, width=192, depth=6, mlp_dim=576, num_heads=6, upscale=1)
        config.model.update(pool='gap', posemb='sincos2d')
    blocks = 1 if smoke else 2
    config.model.update(query_blocks=blocks)

    # Masked attention ends block by block, between the sixth and the five sixths of training.
    config.task = dict(name='segment', stuff=TEXTURES, points=64 if smoke else 256)
    ends = [steps * (1 + 4 * i / blocks) / 6 for i in range(blocks + 1)]
    config.task.anneal_start = tuple(int(step) for step in ends[:-1])
    config.task.anneal_end = tuple(int(step) for step in ends[1:])

    # Making an image takes longer than training on it: each is made once.
    side = 32 if smoke else 112 if pretrained else 96
    data = dict(source='scenes_panoptic:160' if smoke else f'scenes_panoptic:{COUNT}')
    data.update(sizes=((side, side),), cache=not smoke)
    keep = "number_masks|keep('image', 'segments', 'labels')"
    data.update(transforms=f'{keep}|resize_small({side}, max={side})|pad_objects(7)')
    config.data = dict(data, split='train')
    test = dict(data, split='test[:16]' if smoke else 'test')
    quality = dict(test, evaluator='panoptic_quality', threshold=0.35, overlap=0.6)
    config.evals = dict(test=test, quality=quality)

    config.optim = dict(name='adamw', lr=5e-4 if pretrained else 7e-4, weight_decay=0.05)
    config.optim.update(b2=0.99, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='2 steps' if smoke else '200 steps')
    if pretrained:
        config.init = {
            'from': placeholder(str),
            'select': 'patch_embed,cls_token,pos_embed,encoder',
        }
        config.optim.layer_decay = 0.7
    config.step = dict(accum_steps=1, ema_decay=0.0 if smoke else 0.998 if pretrained else 0.999)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '25%')
    config.every.checkpoint = '20' if smoke else '10%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
