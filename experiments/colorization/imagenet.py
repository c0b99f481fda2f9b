r"""Colorful Image Colorization on ImageNet-1k, with a ViT instead of the paper's CNN.

    python -m vit_jax colors tfds:imagenet2012 --images 50000 --out colors.json
    python -m vit_jax train --config experiments/colorization/imagenet.py:B/16 \
        --config.task.prior=colors.json --workdir runs/colorize_imagenet

The argument is the encoder's shape, such as S/16 or B/16 (the default); three blocks of queries
follow.

Zhang et al., 2016, arXiv:1603.08511. From the paper: 313 bins with soft labels, rebalancing (lambda
0.5), colors at a quarter of the resolution (56 x 56 of 224 pixels), and the mean at a temperature
of 0.38. Its solver takes 500,000 steps of Adam (0.9, 0.99) from 3e-5, with 40 images a batch; here
a ViT's optimizer sees as many images, 20 million, in batches of 512.

Expected: a classifier trained in color keeps more of its accuracy than on gray images. In the
paper, VGG-16 reaches 56.0 % on its colors, 52.7 % on gray, 68.3 % on the originals, and 32.3 % of
people are fooled (published, table 1). Not measured by this project yet. Planned (`scaling plan
--config experiments/colorization/imagenet.py:B/16`): 2.7 exaFLOPs, 15 TPU v3 chip-hours at 40 % of
the peak.
"""

from ml_collections import ConfigDict

from vit_jax.models import vit

IMAGES = 20_000_000  # 500,000 steps of 40
ARGS = ('smoke', 'S/16', 'B/16', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: the encoder's shape; `smoke` for a few steps of a tiny one on scenes."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{IMAGES} examples'
    config.batch_size = 16 if smoke else 512

    shape = vit.variant('mu/8' if smoke else arg or 'B/16')
    patch_out = shape['patch_size'] // 4
    config.model = dict(name='colorizer', **shape, patch_out=patch_out, decoder_depth=3)
    config.model.dtype = 'float32' if smoke else 'bfloat16'
    config.task = dict(name='colorize', prior='')

    source, side = ('scenes:160', 32) if smoke else ('tfds:imagenet2012', 224)
    config.data = dict(source=source, split='train')
    keep = "keep('image')|"
    config.data.transforms = f'{keep}inception_crop({side}, 50)|flip'
    config.evals = dict(
        val=dict(source=source, split='test[:16]' if smoke else 'validation[:10000]')
    )
    config.evals.val.transforms = f'{keep}resize_small({side})|central_crop({side})'
    config.evals.val.batch_size = 16 if smoke else 500

    config.optim = dict(name='adamw', lr=5e-4, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10%' if smoke else '2000')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '100', eval='20' if smoke else '5%')
    config.every.checkpoint = '20' if smoke else '2000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
