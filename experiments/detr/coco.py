"""DETR on COCO with the paper's recipe: 500 epochs, or a shorter one.

    python -m vit_jax train experiments/detr/coco.py --workdir runs/detr \\
      --config.init.from=resnet50.safetensors --config.init.select=backbone

COCO 2017 is unpacked in data/coco: annotations/, train2017/, val2017/. The ResNet is pre-trained,
from a file with torchvision's or timm's names (the authors used torchvision's first weights, timm's
resnet50.tv_in1k); its norms and first layers are frozen. `:DC5-R50`, `:R101` and `:DC5-R101` are
the paper's other sizes, `:epochs=150` and `:epochs=300` shorter schedules. See own.py for your own
boxes.

Expected (published, arXiv:2005.12872 and the authors' code): AP 42.0 and AP50 62.4 in 500 epochs,
AP 39.5 in 150; DC5-R50 43.3, R101 43.5, DC5-R101 44.9. By `scaling plan`, 349 chip-hours of a
TPU v3 at 40 % of its peak, and 105 for 150 epochs. Not measured.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import detr

FIELDS = "keep('image', 'boxes', 'labels', 'crowd')"


def get_config(
    variant: Literal['R50', 'DC5-R50', 'R101', 'DC5-R101'] = 'R50',
    epochs: Literal[500, 300, 150] = 500,
) -> ConfigDict:
    """A DETR and the length of its training."""
    config = ConfigDict()
    config.seed = 42
    config.total = f'{epochs} epochs'
    config.batch_size = 64

    config.model = dict(name='detr', num_classes=placeholder(int), frozen_stages=2)
    config.model.update(detr.variant(variant))
    config.task = dict(name='detect')

    # No image is larger than 1333 pixels on either side; a multiple of the stride.
    data = dict(source='coco:data/coco', sizes=((1344, 1344),))
    scales = f'scale_and_crop({tuple(range(480, 801, 32))}, 1333)'
    config.data = dict(data, split='train2017')
    config.data.transforms = f'{FIELDS}|flip|{scales}|pad_objects(100)'
    data.update(transforms=f'{FIELDS}|resize_small(800, max=1333)|pad_objects(100)')
    config.evals = dict(val=dict(data, split='val2017', evaluator='coco_ap'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    config.optim.lr_mults = (('^backbone/', 0.1),)
    config.optim.freeze = ('^backbone/(root|stage_0)/', '^backbone/.*norm')
    drop = {500: 400, 300: 200, 150: 100}[epochs]
    config.optim.schedule = dict(name='stair', boundaries=(f'{drop} epochs',))
    config.every = dict(log='100', eval='10 epochs', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model.update(layers=(1,), backbone_width=4, num_queries=8, width=16, dropout=0.0)
    config.model.update(depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    fields = "keep('image', 'boxes', 'labels')"
    data = dict(source='scenes:160', sizes=((32, 32),))
    config.data = dict(data, split='train', transforms=f'{fields}|flip|pad_objects(6)')
    data.update(transforms=f'{fields}|pad_objects(6)')
    config.evals = dict(val=dict(data, split='test[:16]', evaluator='coco_ap'))
    del config.optim.schedule
    config.every = dict(log='10', eval='20', checkpoint='20')
