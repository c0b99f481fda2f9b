"""DETR for panoptic segmentation of COCO: masks by a head on a frozen detector.

    python -m vit_jax train experiments/detr/coco_panoptic.py \\
      --config.init.from=runs/detr_boxes --workdir runs/detr_panoptic

Carion et al., 2020, arXiv:2005.12872: the second of two stages, 25 epochs after the first,
coco_boxes.py, which describes the data. `:DC5-R50` and `:R101` are the paper's other sizes.

Expected (published by the authors, panoptic val): PQ 43.4, SQ 79.3, RQ 53.8, things' PQ 48.2 and
stuff's 36.3, box AP 38.8; DC5-R50 PQ 44.6, R101 PQ 45.1. Not measured.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import detr
from vit_jax.models.detr_panoptic import DETECTOR

FIELDS = "keep('image', 'masks', 'boxes', 'labels', 'crowd')"


def get_config(variant: Literal['R50', 'DC5-R50', 'R101', 'DC5-R101'] = 'R50') -> ConfigDict:
    """A DETR."""
    config = ConfigDict()
    config.seed = 42
    config.total = '25 epochs'
    config.batch_size = 64

    config.model = dict(name='detr_panoptic', num_classes=placeholder(int), frozen_detector=True)
    config.model.update(detr.variant(variant))
    config.init = {'from': placeholder(str), 'select': ','.join(DETECTOR)}
    # Sorted by id, the 80 thing classes come before the 53 stuff classes.
    config.task = dict(name='segment_panoptic', stuff=tuple(range(80, 133)))

    # No image is larger than 1333 pixels on either side; a multiple of the stride.
    data = dict(source='panoptic:data/coco', sizes=((1344, 1344),))
    scales = f'scale_and_crop({tuple(range(480, 801, 32))}, 1333)'
    end = 'number_masks|pad_objects(100)'
    config.data = dict(data, split='train2017', transforms=f'{FIELDS}|flip|{scales}|{end}')
    data.update(transforms=f'{FIELDS}|resize_small(800, max=1333)|{end}')
    config.evals = dict(val=dict(data, split='val2017', evaluator='panoptic_quality'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    config.optim.freeze = tuple(f'^{part}' for part in DETECTOR)
    config.optim.schedule = dict(name='stair', boundaries=('15 epochs',))
    config.every = dict(log='100', eval='5 epochs', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model.update(layers=(1, 1), backbone_width=4, num_queries=8, width=16, dropout=0.0)
    config.model.update(depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    config.init['from'] = ''
    config.task.stuff = tuple(range(10, 14))
    fields, end = "keep('image', 'masks', 'boxes', 'labels')", 'number_masks|pad_objects(7)'
    data = dict(source='scenes_panoptic:160', sizes=((32, 32),))
    config.data = dict(data, split='train', transforms=f'{fields}|flip|{end}')
    data.update(transforms=f'{fields}|{end}')
    config.evals = dict(val=dict(data, split='test[:16]', evaluator='panoptic_quality'))
    del config.optim.schedule
    config.every = dict(log='10', eval='20', checkpoint='20')
