"""A small ViT on scikit-learn's handwritten digits: the first run, which needs no network.

    python -m vit_jax train --config experiments/vit/digits.py --workdir runs/digits

1,437 training and 360 test images of 8x8 pixels. Expected: test accuracy >= 0.975.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config(arg: str | None = None) -> ConfigDict:
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '60 epochs'
    config.batch_size = 32 if smoke else 128

    config.model = dict(name='vit', **vit.variant('mu/2' if smoke else 'Ti/2'))
    config.model.update(num_classes=placeholder(int), pool='gap', dropout=0.1)
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.2)

    config.data = dict(
        source='digits', split='train', transforms='pad_and_crop(1)', cache=True, workers=0
    )
    config.evals = dict(test=dict(source='digits', split='test', transforms='', cache=True))

    config.optim = dict(
        name='adamw',
        lr=1e-3,
        b2=0.99,
        weight_decay=0.05,
        clip_norm=1.0,
        schedule=dict(name='cosine', warmup='10%'),
    )
    config.step = dict(accum_steps=1, ema_decay=0.99)
    config.every = dict(log='10' if smoke else '50', eval='10' if smoke else '5 epochs')
    config.every.checkpoint = '10' if smoke else '10 epochs'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
