"""ImageNet-1k from scratch: ViT-S/16 in 90 epochs, the plain recipe of Beyer et al. 2022.

    python -m vit_jax train --config experiments/vit/imagenet2012.py --workdir runs/i1k

"Better plain ViT baselines for ImageNet-1k", arXiv:2205.01580. Expected, as
published: 76.5 % after 90 epochs in 6.5 hours on a TPU v3-8; with
`--config.total='300 epochs'`, 80.0 %. Not measured by this project yet.
`imagenet2012.py:B/16` takes another variant.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

ARGS = ('smoke', 'B/16')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant, or `smoke` for a few steps on digits."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '90 epochs'
    config.batch_size = 32 if smoke else 1024

    config.model = dict(name='vit', **vit.variant('mu/4' if smoke else arg or 'S/16'))
    config.model.update(num_classes=placeholder(int), pool='gap', posemb='sincos2d')
    config.model.dtype = 'bfloat16'
    config.task = dict(name='classify', mixup=0.2)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    train, test = ('train', 'test') if smoke else ('train[:99%]', 'validation')
    config.data = dict(
        source=source,
        split=train,
        transforms=f'inception_crop({size})|flip|randaugment(2, 10)',
        workers=0 if smoke else 16,
    )
    center = f'resize_small({size * 8 // 7})|central_crop({size})'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='9%')  # 10,000 of 112,000 steps
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='10' if smoke else '5 epochs')
    config.every.checkpoint = '10' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
