"""PMT on `scenes_panoptic` with a frozen DINOv2 ViT-S/14: panoptic segmentation on a CPU.

    python -m vit_jax train experiments/pmt/scenes.py \\
      --config.init.from=hf://facebook/dinov2-small --workdir runs/pmt_scenes

As eomt/scenes_vit_s14.py, which trains the encoder too, at the same cost: half as many steps.

Expected: PQ of at least 0.647 on the 500 test images, as panoptic DETR has. Measured: PQ 0.650 (SQ
0.828, RQ 0.768) after 53 minutes of CPU time of one core of an Intel Xeon, where EoMT has 0.823.
One seed; the test images chose nothing.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

STEPS, BLOCKS = 1_000, 6


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = f'{STEPS} steps'
    config.batch_size = 8

    config.model = dict(name='pmt', num_classes=placeholder(int), num_queries=16)
    config.model.update(vit.variant('S/14'), query_blocks=BLOCKS, upscale=2)
    config.model.update(layer_scale=1e-5, gelu='erf')
    encoder = 'patch_embed,cls_token,pos_embed,encoder'
    config.init = {'from': placeholder(str), 'select': encoder}

    config.task = dict(name='segment', stuff=(10, 11, 12, 13), points=256)
    # Masked attention ends at once in the first block, and in the others one by one, each within a
    # sixth of training.
    starts = [STEPS * (4 / 15 + i / 10) for i in range(BLOCKS - 1)]
    config.task.anneal_start = (0, *map(int, starts))
    config.task.anneal_end = (STEPS // 30, *(int(start + STEPS / 6) for start in starts))

    # Making an image takes longer than reading it: each is made once.
    data = dict(source='scenes_panoptic:10000', sizes=((112, 112),), cache=True)
    keep = "number_masks|keep('image', 'segments', 'labels')"
    data.update(transforms=f'{keep}|resize_small(112, max=112)|pad_objects(7)')
    config.data, test = dict(data, split='train'), dict(data, split='test')
    quality = dict(test, evaluator='panoptic_quality', threshold=0.35, overlap=0.6)
    config.evals = dict(test=test, quality=quality)

    config.optim = dict(name='adamw', lr=5e-4, weight_decay=0.05, b2=0.99, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='100 steps')
    config.optim.freeze = (f'^({"|".join(ENCODER)})(/|$)',)
    config.step = dict(ema_decay=0.998)
    config.every = dict(log='50', eval='25%', checkpoint='10%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model, from scratch."""
    config.total = '20 steps'
    config.model = dict(name='pmt', num_classes=placeholder(int), query_blocks=1, num_queries=16)
    config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    del config.init
    config.task.update(points=64, anneal_start=(3,), anneal_end=(16,))
    for entry in (config.data, *config.evals.values()):
        entry.update(source='scenes_panoptic:160', sizes=((32, 32),), cache=False)
        entry.transforms = entry.transforms.replace('112', '32')
    for entry in config.evals.values():
        entry.split = 'test[:16]'
    config.optim.schedule.warmup = '2 steps'
    config.step.ema_decay = 0.0
    config.every = dict(log='10', eval='20', checkpoint='20')
