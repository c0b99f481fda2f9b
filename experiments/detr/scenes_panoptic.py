"""Panoptic DETR on `scenes_panoptic`, digits on four kinds of textures, without download.

    python -m vit_jax train experiments/detr/scenes_panoptic.py \\
      --config.init.from=runs/scenes_boxes --workdir runs/scenes_panoptic

The second of the paper's two stages: a mask head is trained on the frozen detector of
scenes_boxes.py.

Expected: PQ of at least 0.60 on the 500 test images. Measured: PQ 0.647 (SQ 0.842, RQ 0.761; things
0.562, stuff 0.861) after 3 epochs of masks in about 10 minutes of one CPU core. PQ was 0.606 after
the first epoch of masks and 0.640 after the second.

It was run once, but earlier on other images: while textures differed only in pattern, not in color,
6 epochs of boxes and one of masks reached PQ 0.230: 35 % of the textures were classified correctly.
Where no texture is certain, its pixels go to the digits.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models.detr_panoptic import DETECTOR

FIELDS = "keep('image', 'masks', 'boxes', 'labels')"


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '3 epochs'
    config.batch_size = 8

    # The detector of scenes_boxes.py.
    config.model = dict(name='detr_panoptic', num_classes=placeholder(int), dropout=0.0)
    config.model.update(norm='pre', backbone_norm='group', layers=(1, 1), backbone_width=24)
    config.model.update(num_queries=16, width=128, depth=1, decoder_depth=3, num_heads=4)
    # Digits are strokes of two or three pixels, and at most 7 of 16 queries match an object.
    config.model.update(mlp_dim=256, frozen_detector=True, mask_stride=2, num_masks=8)
    config.model.box_maps = True
    config.init = {'from': placeholder(str), 'select': ','.join(DETECTOR)}
    config.task = dict(name='segment_panoptic', stuff=(10, 11, 12, 13))

    # Making an image takes longer than training on it: each is made once.
    data = dict(source='scenes_panoptic:4000', sizes=((64, 64),), cache=True)
    data.update(transforms=f'{FIELDS}|resize_small(64, max=64)|number_masks|pad_objects(7)')
    config.data, test = dict(data, split='train'), dict(data, split='test')
    config.evals = dict(test=test, quality=dict(test, evaluator='panoptic_quality'))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    config.optim.freeze = tuple(f'^{part}' for part in DETECTOR)
    # Constant, with averaged weights, so that `train --extend` can lengthen a run.
    config.optim.schedule = dict(name='constant', warmup='50 steps')
    config.step = dict(ema_decay=0.99)
    config.every = dict(log='50', eval='1 epoch', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model, detector and masks at once."""
    config.total = '20 steps'
    config.model = dict(name='detr_panoptic', num_classes=placeholder(int), dropout=0.0)
    config.model.update(norm='pre', backbone_norm='group', layers=(1,), backbone_width=4)
    config.model.update(num_queries=8, width=16, depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    del config.init
    for entry in (config.data, *config.evals.values()):
        entry.update(source='scenes_panoptic:160', sizes=((32, 32),), cache=False)
        entry.transforms = f'{FIELDS}|resize_small(32, max=32)|number_masks|pad_objects(7)'
    for entry in config.evals.values():
        entry.split = 'test[:16]'
    config.optim.update(lr=8e-4, freeze=())
    config.optim.schedule.warmup = '2 steps'
    config.step.ema_decay = 0.0
    config.every = dict(log='10', eval='20', checkpoint='20')
