"""DETR on `scenes`, digits on textured grounds: detection from scratch on a CPU, without download.

    python -m vit_jax train --config experiments/detr/scenes.py --workdir runs/scenes

Expected: AP50 >= 0.90 on the 500 test images, whose digits are not those of training, in under
2 hours on 2 CPU cores. Not measured yet.
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
    config.total = '20 steps' if smoke else '12 epochs'
    config.batch_size = 8 if smoke else 32

    # Digits never look the same twice, so that nothing has to be dropped.
    config.model = dict(name='detr', num_classes=placeholder(int), dropout=0.0, norm='pre')
    config.model.update(backbone_norm='group', layers=(1,) if smoke else (1, 1, 1))
    if smoke:
        config.model.update(backbone_width=4, num_queries=8, width=16)
        config.model.update(depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    else:
        config.model.update(backbone_width=32, num_queries=20, width=128)
        config.model.update(depth=3, decoder_depth=3, num_heads=8, mlp_dim=512)
    config.task = dict(name='detect')

    source, size = ('scenes:160', (32, 32)) if smoke else ('scenes', (128, 128))
    config.data = dict(source=source, split='train', sizes=(size,))
    config.data.transforms = f'{FIELDS}|pad_objects(6)'
    test = dict(source=source, split='test[:16]' if smoke else 'test', sizes=(size,))
    test.update(transforms=f'{FIELDS}|pad_objects(6)')
    config.evals = dict(test=test, ap=dict(test, evaluator='coco_ap'))

    config.optim = dict(name='adamw', lr=4e-4, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    config.optim.schedule = dict(name='cosine', warmup='2%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
