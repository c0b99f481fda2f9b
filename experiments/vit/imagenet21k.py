r"""ImageNet-21k, 90 epochs: the pre-training of the ViT paper's checkpoints.

    python -m vit_jax train --config experiments/vit/imagenet21k.py --workdir runs/i21k \
        --config.data.source=folder:IMAGES --config.evals.val.source=folder:IMAGES

IMAGES holds one folder of images per class, 21,843 in the release of fall 2011 (image-net.org);
TFDS lacks this dataset. The first two images of each class are held out for `val`.

Dosovitskiy et al., 2021, arXiv:2010.11929, table 3; the final learning rate, the sigmoid loss and
the head's bias come from the authors in github.com/google-research/vision_transformer/issues/2 and
34. Expected, as published: 47.88 % on their validation split for B/16, 44.04 % for B/32, 49.90 %
for L/16 (issue 62 there); on ImageNet-1k, after `finetune.py`, 83.97, 81.28 and 85.15 % (table 5).
Pre-training L/16 takes 230 TPU v3-core-days (table 2). Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.models import vit

ARGS = ('smoke', 'B/32,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant, or `smoke` for a few steps on digits; `fast` as the last word."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '90 epochs'
    config.batch_size = 32 if smoke else 4096

    config.model = dict(name='vit', **vit.variant('mu/4' if smoke else arg or 'B/16'))
    config.model.update(num_classes=placeholder(int), dropout=0.1, **dtypes)
    # With 21,843 classes a bias of 0 would give a loss of 15,000 nats at the first step.
    config.model.update(representation_size=config.model.width, head_bias=-10.0)
    config.task = dict(name='classify', loss_name='sigmoid')

    source, size = ('digits', 16) if smoke else ('folder:imagenet21k', 224)
    config.data = dict(
        source=source,
        split='train' if smoke else 'train[2: per class]',
        transforms=f'inception_crop_tf({size})|flip',
    )
    center = f'resize_small_tf({size * 8 // 7})|central_crop({size})'
    held_out = 'test' if smoke else 'train[:2 per class]'
    config.evals = dict(val=dict(source=source, split=held_out, transforms=center))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.03, clip_norm=1.0)
    config.optim.schedule = dict(
        name='linear', warmup='10%' if smoke else '10000 steps', final=1e-5
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
