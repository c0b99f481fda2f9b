r"""ImageNet at 256 or 512 pixels out of noise, by a plain ViT on patches of 16 or 32 pixels.

    python -m vit_jax train experiments/jit/imagenet.py:B/16 --workdir runs/jit_b16
    python -m vit_jax sample runs/jit_b16 --count 50 --guidance 3 --out samples.npz

B/16, L/16 or H/16 for images of 256 pixels; B/32, L/32 or H/32 for 512, where as many tokens stand
for 3,072 values each, and the noise has twice the scale.

Li and He, 2025, arXiv:2511.13720, table 9. Expected, as published after 600 epochs (table 6): an
FID of 50,000 samples of 3.66 (B/16), 2.36 (L/16) and 1.86 (H/16); 4.02 (B/32), 2.53 (L/32) and 1.94
(H/32). Not measured by this project yet. Other tools measure the FID of `samples.npz`.

By `preflight`, a step of 1,024 images with `fast` takes, and 600 epochs at least:

    size    GiB of 16    ms  chip-hours on v5e:8x8    GiB of 59.3   ms  chip-hours on h100:8
    B/16          3.6  17.5    233                           18.3   43     72
    B/32          4.1  21.7    290                           19.0   44     73
    L/16         11.1  57.3    765                           52.0  143    239
    H/16          9.2   100  1,335  in fsdp=8                36.8  300    501  in accum_steps=4

Differences from the authors' public code: projections start as separate matrices, images are
resized by one bicubic filter, and one average of the parameters is kept, with 0.9999.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import jit

# Pixels, guidance by which the published numbers were found, and dropout.
SIZES = {
    'B/16': (256, 2.9, 0.0),
    'L/16': (256, 2.4, 0.0),
    'H/16': (256, 2.2, 0.2),
    'B/32': (512, 2.9, 0.0),
    'L/32': (512, 2.5, 0.0),
    'H/32': (512, 2.3, 0.2),
}
Variant = Literal['B/16', 'L/16', 'H/16', 'B/32', 'L/32', 'H/32']


def get_config(variant: Variant = 'B/16', epochs: int = 600, fast: bool = False) -> ConfigDict:
    """A JiT and the length of its training; `fast` keeps the residual stream in bfloat16."""
    pixels, guidance, dropout = SIZES[variant]
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='jit', num_classes=placeholder(int), **jit.variant(variant))
    config.model.update(dropout=dropout)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='generate', guidance=guidance, steps=50, noise_scale=pixels / 256)

    images = dict(source='tfds:imagenet2012')
    crop = f"resize_small({pixels}, 'bicubic')|central_crop({pixels})"
    config.data = dict(images, split='train', transforms=f'{crop}|flip')
    config.evals = dict(val=dict(images, split='validation', transforms=crop))

    config.optim = dict(name='adamw', lr=2e-4, b2=0.95)
    config.optim.schedule = dict(name='constant', warmup='5 epochs')
    config.step = dict(ema_decay=0.9999)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(jit.variant('mu/2'))
    config.task.steps = 4
    config.data.update(source='digits', transforms='flip')
    config.evals.val.update(source='digits', split='test', transforms='')
    config.optim.schedule.warmup = '10%'
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='20')
