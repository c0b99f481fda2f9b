"""DETR on COCO with the paper's recipe: 500 epochs, or a shorter one.

    python -m vit_jax train --config experiments/detr/coco.py --workdir runs/detr \\
      --config.init.from=resnet50.safetensors --config.init.select=backbone

COCO 2017 is unpacked in data/coco: annotations/, train2017/, val2017/. The ResNet is pre-trained,
from a file with torchvision's or timm's names (the authors used torchvision's first weights, timm's
resnet50.tv_in1k); its norms and first layers are frozen. `:DC5-R50`, `:R101` and `:DC5-R101` are
the paper's other sizes, `:R50,150ep` and `:R50,300ep` shorter schedules. To fine-tune a whole DETR
on your own data:

      --config.init.from=detr-r50.safetensors --config.data.source=coco:/data/cells ...

Expected (published, arXiv:2005.12872 and the authors' code): AP 42.0 and AP50 62.4 in 500 epochs,
AP 39.5 in 150; DC5-R50 43.3, R101 43.5, DC5-R101 44.9. By `scaling plan`, 349 chip-hours of a
TPU v3 at 40 % of its peak, and 105 for 150 epochs. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import check_choice
from vit_jax.models import detr

# Epochs, and the epoch after which the learning rate is a tenth.
SCHEDULES = {'500ep': (500, 400), '300ep': (300, 200), '150ep': (150, 100)}
ARGS = ('smoke', 'R50,150ep', 'DC5-R101,300ep', ...)
SCALES = tuple(range(480, 801, 32))
FIELDS = "keep('image', 'boxes', 'labels', 'crowd')"
# No image is larger than 1333 pixels on either side; a multiple of the stride.
FRAME = (1344, 1344)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a variant of DETR and epochs, as `R50,150ep`; `smoke` for a few steps on scenes."""
    smoke = arg == 'smoke'
    name, schedule = ('R50', '500ep') if smoke else parse(arg)
    epochs, drop = SCHEDULES[schedule]
    config = ConfigDict()
    config.seed = 42
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 8 if smoke else 64

    config.model = dict(name='detr', num_classes=placeholder(int), frozen_stages=2)
    if smoke:
        config.model.update(layers=(1,), backbone_width=4, num_queries=8, width=16, dropout=0.0)
        config.model.update(depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    else:
        config.model.update(detr.variant(name))
    config.task = dict(name='detect')

    if smoke:
        fields = FIELDS.replace(", 'crowd'", '')
        data = dict(source='scenes:160', sizes=((32, 32),))
        config.data = dict(data, split='train', transforms=f'{fields}|flip|pad_objects(6)')
        test = dict(data, split='test[:16]', transforms=f'{fields}|pad_objects(6)')
    else:
        data = dict(source='coco:data/coco', sizes=(FRAME,))
        augment = f'{FIELDS}|flip|scale_and_crop({SCALES}, 1333)|pad_objects(100)'
        config.data = dict(data, split='train2017', transforms=augment)
        test = dict(data, split='val2017', transforms=f'{FIELDS}|resize_small(800, max=1333)')
        test['transforms'] += '|pad_objects(100)'
    config.evals = dict(val=dict(test, evaluator='coco_ap'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    config.optim.lr_mults = (('^backbone/', 0.1),)
    config.optim.freeze = ('^backbone/(root|stage_0)/', '^backbone/.*norm')
    if not smoke:
        config.optim.schedule = dict(name='stair', boundaries=(f'{drop} epochs',))
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '100', eval='20' if smoke else '10 epochs')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def parse(arg: str | None) -> tuple[str, str]:
    """`'R101,300ep'` as ('R101', '300ep'); R50 and 500ep by default.

    Raises:
      UserError: if there is no such schedule.
    """
    name, schedule = 'R50', '500ep'
    for part in filter(None, (arg or '').split(',')):
        if part.endswith('ep'):
            schedule = part
        else:
            name = part
    check_choice('schedule', schedule, SCHEDULES)
    return name, schedule
