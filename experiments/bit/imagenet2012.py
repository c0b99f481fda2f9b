"""ImageNet-1k from scratch: BiT-S, a ResNet with group norm and weight standardization.

    python -m vit_jax train --config experiments/bit/imagenet2012.py --workdir runs/bit_i1k

Kolesnikov et al., 2020, arXiv:1912.11370, section 4.1: SGD with momentum, batch 4096, 90 epochs,
5,000 steps of warm-up, learning rate 0.03 per 256 images, divided by ten at epochs 30, 60 and 80.
The authors publish no number for this recipe from scratch, only after fine-tuning. Expected, from
their similar comparison of norms: about 76 % for R50x1 with group norm and weight standardization.
Its hours are not published; 90 epochs of another recipe take big_vision 32 minutes on a TPU v3-128.
Not measured by this project yet. `imagenet2012.py:R101x1` selects another variant.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import bit_resnet

ARGS = ('smoke', 'R101x1', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a BiT variant, or `smoke` for a few steps on digits."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '90 epochs'
    config.batch_size = 16 if smoke else 4096

    size = dict(layers=(1,)) if smoke else bit_resnet.variant(arg or 'R50x1')
    config.model = dict(name='bit_resnet', num_classes=placeholder(int), dtype='bfloat16', **size)
    config.task = dict(name='classify')

    source, pixels = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    config.data = dict(
        source=source,
        split='train' if smoke else 'train[:99%]',
        transforms=f'inception_crop_tf({pixels})|flip',
    )
    center = f'resize_small_tf({pixels * 8 // 7})|central_crop({pixels})'
    test = 'test' if smoke else 'validation'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    lr = 0.03 * config.batch_size / 256
    config.optim = dict(name='sgd', momentum=0.9, lr=lr, weight_decay=1e-4)
    config.optim.schedule = dict(
        name='stair',
        warmup='10%' if smoke else '5000 steps',
        boundaries=('50%',) if smoke else ('30 epochs', '60 epochs', '80 epochs'),
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
