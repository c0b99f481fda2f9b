"""Panoptic DETR on `scenes_panoptic`, digits before grounds of four kinds, without any download.

    python -m vit_jax train --config experiments/detr/scenes_panoptic.py:boxes \\
      --workdir runs/scenes_boxes
    python -m vit_jax train --config experiments/detr/scenes_panoptic.py \\
      --config.init.from=runs/scenes_boxes --workdir runs/scenes_panoptic

By the paper's two stages: `:boxes` trains a detector of digits and grounds, then a mask head learns
on that detector, which stays as it is. Two CPU cores will do. Of the panoptic quality on the 500
test images no number is expected yet: neither stage has been run to its end.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models.detr_panoptic import DETECTOR

ARGS = ('smoke', 'boxes')
FIELDS = "keep('image', 'masks', 'boxes', 'labels')"
END = 'number_masks|pad_objects(7)'


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `boxes` for the first stage, `smoke` for a few steps of a tiny model of both."""
    smoke, boxes = arg == 'smoke', arg == 'boxes'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '12 epochs' if boxes else '2 epochs'
    config.batch_size = 8 if smoke else 32

    config.model = dict(name='detr' if boxes else 'detr_panoptic', num_classes=placeholder(int))
    config.model.update(dropout=0.0, norm='pre', backbone_norm='group')
    if smoke:
        config.model.update(layers=(1,), backbone_width=4, num_queries=8, width=16)
        config.model.update(depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    else:
        config.model.update(layers=(1, 1, 1), backbone_width=32, num_queries=20, width=128)
        config.model.update(depth=3, decoder_depth=3, num_heads=8, mlp_dim=512)
    config.task = dict(name='detect')
    if not boxes:
        config.task = dict(name='segment_panoptic', stuff=(10, 11, 12, 13))

    source, size = ('scenes_panoptic:160', (32, 32)) if smoke else ('scenes_panoptic', (128, 128))
    data = dict(source=source, sizes=(size,), transforms=f'{FIELDS}|{END}')
    config.data = dict(data, split='train')
    test = dict(data, split='test[:16]' if smoke else 'test')
    quality = dict(test, evaluator='coco_ap' if boxes else 'panoptic_quality')
    config.evals = dict(test=test, quality=quality)

    config.optim = dict(name='adamw', lr=4e-4, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    config.optim.schedule = dict(name='cosine', warmup='2%')
    if not (smoke or boxes):
        config.init = {'from': placeholder(str), 'select': ','.join(DETECTOR)}
        config.model.frozen_detector = True
        config.optim.freeze = tuple(f'^{part}' for part in DETECTOR)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
