"""EoMT on `scenes_panoptic`, digits on four kinds of textures: panoptic segmentation, no download.

    python -m vit_jax train --config experiments/eomt/scenes.py --workdir runs/eomt_scenes
    python -m vit_jax train --config experiments/eomt/scenes.py:vit_s14 \\
      --config.init.from=FOLDER --workdir runs/eomt_vit_s14

In one stage, from scratch, where detr/scenes_panoptic.py needs three. `:vit_s14` starts from a
DINOv2 ViT-S/14, at ten times the cost of an image.

Expected: PQ of at least 0.647 on the 500 test images, that of panoptic DETR. Neither has been run
to its end. Width, rate and thresholds are from trials of 5,000 steps in a loop of their own on one
H100, judged on 400 images of digits that were held out from training, one seed each: at width 128,
PQ was 0.456, 0.539 and 0.480 at rates of 5e-4, 1e-3 and 2e-3; twice the images gave 0.544, and
patches of 4 pixels 0.541. With images also scaled at random it was 0.475 at width 128 and 0.580 at
192 (things 0.417, stuff 0.988), so that digits, not masks, are what is left to learn.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

ARGS = ('smoke', 'vit_s14')
COUNT, BATCH = 10_000, 16
TEXTURES = (10, 11, 12, 13)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `vit_s14` to start from a ViT, `smoke` for a few steps of a tiny model."""
    smoke, pretrained = arg == 'smoke', arg == 'vit_s14'
    config = ConfigDict()
    config.seed = 0
    epochs = 2 if pretrained else 8
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 8 if smoke else BATCH
    steps = 20 if smoke else epochs * COUNT // BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), num_queries=16, upscale=2)
    if smoke:
        config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    elif pretrained:
        config.model.update(vit.variant('S/14'), patch_size=8, layer_scale=1e-5, gelu='erf')
    else:
        config.model.update(patch_size=8, width=192, depth=6, mlp_dim=576, num_heads=6)
        config.model.update(pool='gap', posemb='sincos2d')
    blocks = 1 if smoke else 2
    config.model.update(query_blocks=blocks)

    # Masked attention ends block by block, between the sixth and the five sixths of training.
    config.task = dict(name='segment', stuff=TEXTURES, points=64 if smoke else 256)
    ends = [steps * (1 + 4 * i / blocks) / 6 for i in range(blocks + 1)]
    config.task.anneal_start = tuple(int(step) for step in ends[:-1])
    config.task.anneal_end = tuple(int(step) for step in ends[1:])

    # Making an image takes longer than training on it: each is made once.
    side = 32 if smoke else 64
    data = dict(source='scenes_panoptic:160' if smoke else f'scenes_panoptic:{COUNT}')
    data.update(sizes=((side, side),), cache=not smoke)
    keep = "number_masks|keep('image', 'segments', 'labels')"
    data.update(transforms=f'{keep}|resize_small({side}, max={side})|pad_objects(7)')
    config.data = dict(data, split='train')
    test = dict(data, split='test[:16]' if smoke else 'test')
    quality = dict(test, evaluator='panoptic_quality', threshold=0.35, overlap=0.6)
    config.evals = dict(test=test, quality=quality)

    config.optim = dict(name='adamw', lr=1e-4 if pretrained else 1e-3, weight_decay=0.05)
    config.optim.update(b2=0.99, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='2 steps' if smoke else '200 steps')
    if pretrained:
        config.init = {
            'from': placeholder(str),
            'select': 'patch_embed,cls_token,pos_embed,encoder',
        }
        config.optim.layer_decay = 0.8
    config.step = dict(accum_steps=1, ema_decay=0.0 if smoke else 0.998)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '2 epochs')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
