"""DETR for panoptic segmentation of COCO, in the paper's two stages: boxes first, then masks.

    python -m vit_jax train --config experiments/detr/coco_panoptic.py:boxes \\
      --workdir runs/detr_boxes \\
      --config.init.from=resnet50.safetensors --config.init.select=backbone
    python -m vit_jax train --config experiments/detr/coco_panoptic.py \\
      --config.init.from=runs/detr_boxes --workdir runs/detr_panoptic

The first stage, 300 epochs, detects things and stuff as boxes; the second, 25 epochs, trains a mask
head on the frozen detector. COCO 2017 is unpacked in data/coco:
annotations/panoptic_{train,val}2017.json with the folders of the same names, train2017/, val2017/.
`:DC5-R50` and `:R101`, `:boxes,DC5-R50` and `:boxes,R101` are the paper's other sizes.

Expected (published by the authors, panoptic val): PQ 43.4, SQ 79.3, RQ 53.8, things' PQ 48.2 and
stuff's 36.3, box AP 38.8; DC5-R50 PQ 44.6, R101 PQ 45.1. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import detr
from vit_jax.models.detr_panoptic import DETECTOR

ARGS = ('smoke', 'boxes', 'DC5-R50', 'boxes,R101', ...)
SCALES = tuple(range(480, 801, 32))
# No image is larger than 1333 pixels on either side; a multiple of the stride.
FRAME = (1344, 1344)
# Sorted by id, the 80 thing classes come before the 53 stuff classes.
STUFF = tuple(range(80, 133))


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a variant of DETR, `boxes` for the first stage, or both; `smoke` for a few steps of
    the second stage on scenes.
    """
    smoke, parts = arg == 'smoke', [] if arg == 'smoke' else (arg or '').split(',')
    boxes = 'boxes' in parts
    name = next((part for part in parts if part not in ('boxes', '')), 'R50')
    epochs, drop = (300, 200) if boxes else (25, 15)
    config = ConfigDict()
    config.seed = 42
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 8 if smoke else 64

    config.model = dict(name='detr' if boxes else 'detr_panoptic', num_classes=placeholder(int))
    if smoke:
        config.model.update(layers=(1, 1), backbone_width=4, num_queries=8, width=16, dropout=0.0)
        config.model.update(depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    else:
        config.model.update(detr.variant(name))
    config.task = dict(name='detect' if boxes else 'segment_panoptic')
    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    if boxes:
        config.model.frozen_stages = 2
        config.optim.lr_mults = (('^backbone/', 0.1),)
        config.optim.freeze = ('^backbone/(root|stage_0)/', '^backbone/.*norm')
    else:
        config.model.frozen_detector = True
        config.optim.freeze = tuple(f'^{part}' for part in DETECTOR)
        config.init = {'from': '' if smoke else placeholder(str), 'select': ','.join(DETECTOR)}
        config.task.stuff = tuple(range(10, 14)) if smoke else STUFF
    if not smoke:
        config.optim.schedule = dict(name='stair', boundaries=(f'{drop} epochs',))

    if smoke:
        data = dict(source='scenes_panoptic:160', sizes=((32, 32),))
        fields, end = "keep('image', 'masks', 'boxes', 'labels')", 'number_masks|pad_objects(7)'
        config.data = dict(data, split='train', transforms=f'{fields}|flip|{end}')
        test = dict(data, split='test[:16]', transforms=f'{fields}|{end}')
    else:
        masks = '' if boxes else "'masks', "
        fields = f"keep('image', {masks}'boxes', 'labels', 'crowd')"
        end = 'pad_objects(100)' if boxes else 'number_masks|pad_objects(100)'
        data = dict(source='panoptic:data/coco', sizes=(FRAME,))
        augment = f'{fields}|flip|scale_and_crop({SCALES}, 1333)|{end}'
        config.data = dict(data, split='train2017', transforms=augment)
        test = dict(data, split='val2017', transforms=f'{fields}|resize_small(800, max=1333)|{end}')
    config.evals = dict(val=dict(test, evaluator='coco_ap' if boxes else 'panoptic_quality'))

    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '100', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
