"""DETR on things and stuff of COCO as boxes: the first stage of its panoptic segmentation.

    python -m vit_jax train experiments/detr/coco_boxes.py --workdir runs/detr_boxes \\
      --config.init.from=resnet50.safetensors --config.init.select=backbone

Carion et al., 2020, arXiv:2005.12872: 300 epochs; coco_panoptic.py goes on from here. COCO 2017 is
unpacked in data/coco: annotations/panoptic_{train,val}2017.json with the folders of the same names,
train2017/, val2017/. `:DC5-R50` and `:R101` are the paper's other sizes.

Expected (published by the authors, panoptic val, after the second stage): box AP 38.8. Not
measured.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import detr

FIELDS = "keep('image', 'boxes', 'labels', 'crowd')"


def get_config(variant: Literal['R50', 'DC5-R50', 'R101', 'DC5-R101'] = 'R50') -> ConfigDict:
    """A DETR."""
    config = ConfigDict()
    config.seed = 42
    config.total = '300 epochs'
    config.batch_size = 64

    config.model = dict(name='detr', num_classes=placeholder(int), frozen_stages=2)
    config.model.update(detr.variant(variant))
    config.task = dict(name='detect')

    # No image is larger than 1333 pixels on either side; a multiple of the stride.
    data = dict(source='panoptic:data/coco', sizes=((1344, 1344),))
    scales = f'scale_and_crop({tuple(range(480, 801, 32))}, 1333)'
    config.data = dict(data, split='train2017')
    config.data.transforms = f'{FIELDS}|flip|{scales}|pad_objects(100)'
    data.update(transforms=f'{FIELDS}|resize_small(800, max=1333)|pad_objects(100)')
    config.evals = dict(val=dict(data, split='val2017', evaluator='coco_ap'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    config.optim.lr_mults = (('^backbone/', 0.1),)
    config.optim.freeze = ('^backbone/(root|stage_0)/', '^backbone/.*norm')
    config.optim.schedule = dict(name='stair', boundaries=('200 epochs',))
    config.every = dict(log='100', eval='5 epochs', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model.update(layers=(1,), backbone_width=4, num_queries=8, width=16, dropout=0.0)
    config.model.update(depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    fields = "keep('image', 'boxes', 'labels')"
    data = dict(source='scenes_panoptic:160', sizes=((32, 32),))
    config.data = dict(data, split='train', transforms=f'{fields}|flip|pad_objects(7)')
    data.update(transforms=f'{fields}|pad_objects(7)')
    config.evals = dict(val=dict(data, split='test[:16]', evaluator='coco_ap'))
    del config.optim.schedule
    config.every = dict(log='10', eval='20', checkpoint='20')
