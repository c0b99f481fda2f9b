"""ImageNet in one step: pMF at 256 pixels (B/16, L/16, H/16) or 512 (B/32, L/32, H/32).

    python -m vit_jax train experiments/meanflow/imagenet.py:B/16 --workdir runs/pmf_b16
    python -m vit_jax sample runs/pmf_b16 --count 50 --out samples.npz

Lu et al., 2026, arXiv:2601.22158, and the authors' code, Lyy-iiis/pMF. Expected, as published with
one step: an FID of 50,000 samples of 3.11 (B/16), 2.50 (L/16) and 2.11 (H/16). Not measured by this
project.

By `preflight`, a step of B/16 takes at least 75 ms and 8.8 GiB a chip on v5e:8x8 (320 epochs 536
chip-hours), 239 ms and 47.2 GiB on h100:8 (213); L/16 263 ms and 14.3 GiB on v5e:8x8 (1,871),
B/32 88 ms and 9.5 GiB (624).

Differences from the authors' code: no perceptual losses (LPIPS 0.4 and ConvNeXt 0.1 there, without
which the published FID is not to be expected); half of the examples have a span of 0 by chance,
not half of each batch; one average of the parameters, with the half-life of a million images;
initial values of the dense layers.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import pmf

# Pixels, guidance and its interval by which the published numbers were found, guidance's exponent.
SIZES = {
    'B/16': (256, 8.5, (0.3, 0.9), 1.0),
    'L/16': (256, 7.0, (0.3, 0.8), 2.0),
    'H/16': (256, 7.0, (0.3, 0.8), 2.0),
    'B/32': (512, 6.5, (0.3, 0.9), 1.0),
    'L/32': (512, 7.0, (0.3, 0.8), 2.0),
    'H/32': (512, 7.0, (0.3, 0.8), 2.0),
}


def get_config(size: str = 'B/16', epochs: int = 320) -> ConfigDict:
    """The recipe, with a size of `SIZES` and the number of epochs."""
    pixels, guidance, interval, power = SIZES[size]
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='pmf', **pmf.variant(size), num_classes=placeholder(int))
    config.model.update(dtype='bfloat16', residual_dtype='float32')
    config.task = dict(name='meanflow', guidance=guidance, interval=interval)
    config.task.update(guidance_power=power, noise_scale=pixels / 256)

    crop = f"resize_small({pixels}, 'bicubic')|central_crop({pixels})"
    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train', transforms=f'{crop}|flip')
    config.evals = dict(val=dict(images, split='validation', transforms=crop))

    config.optim = dict(name='muon', lr=1e-3, b2=0.95, weight_decay=0.0)
    config.optim.schedule = dict(name='constant', warmup='')
    config.step = dict(ema_decay=0.99929)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    config.checkpoint = dict(keep_last=2)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(pmf.variant('mu/2'))
    config.data.update(source='digits', transforms='flip')
    config.evals.val.update(source='digits', split='test', transforms='')
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='20')
