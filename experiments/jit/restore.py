r"""Images out of gray or small ones: colorization and super-resolution by JiT, without a network.

    python -m vit_jax train experiments/jit/restore.py:gray --workdir runs/jit_gray
    python -m vit_jax predict --workdir runs/jit_gray photo.jpg --out colors.png
    python -m vit_jax evaluate --workdir runs/jit_gray --evaluator restoration

The argument is `gray`, the default but for digits, or `small` for images whose sides are a quarter
as long, of scenes of digits at 48 pixels. With `data=cifar10` they learn from CIFAR-10 at 32
pixels, and with `data=digits` from handwritten digits of 8 pixels, of which 2 x 2 are given.

Expected: samples that fit what is given, and differ where it leaves a choice. Where colors or
details are uncertain, a sample is farther from the original than what is given, which lies in the
middle of what is possible. Measured PSNR of a sample and of what is given, in dB, after 4 to 5
minutes of CPU time of an Intel Xeon (1.5 with digits), on 300 test images, 600 of CIFAR-10:
`small,digits` 12.1 and 8.9, `small` 24.0 and 23.4, `small,cifar10` 19.8 and 20.2, `gray` 20.3 and
21.8, `gray,cifar10` 21.0 and 25.5. Samples are in docs/generation.md; experiments/README.md has
other colorizers beside `gray,cifar10`.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Source of images, the transforms that prepare them, and a patch size.
DATA = {
    'scenes': ('scenes', "keep('image')|resize(48)", 6),
    'cifar10': ('tfds:cifar10', '', 4),
    'digits': ('digits', '', 2),
}


def get_config(
    given: Literal['gray', 'small'] | None = None,
    data: Literal['scenes', 'cifar10', 'digits'] = 'scenes',
) -> ConfigDict:
    """What is given, and the images."""
    given = given or ('small' if data == 'digits' else 'gray')  # digits are gray
    source, transforms, patch_size = DATA[data]
    config = ConfigDict()
    config.total = '40000 examples'
    config.batch_size = 64

    config.model = dict(name='jit', patch_size=patch_size, width=96, depth=4, mlp_dim=256)
    config.model.update(num_heads=4, bottleneck=48, context_tokens=0, context_start=0)
    config.model.num_classes = placeholder(int)
    config.task = dict(name='image_to_image', given=given, steps=25, samples=3)

    images = dict(source=source, transforms=transforms, workers=0, cache=data != 'scenes')
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:300]', batch_size=100))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.95, clip_norm=1.0)
    config.optim.schedule = dict(name='constant', warmup='5%')
    config.step = dict(ema_decay=0.99)
    config.every = dict(log='50', eval='25%', checkpoint='10%', examples='50%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(patch_size=6, width=32, depth=2, mlp_dim=64, num_heads=2, bottleneck=8)
    config.task.steps = 4
    images = dict(source='scenes:160', transforms="keep('image')|resize(48)", workers=0)
    config.data = dict(images, split='train')
    config.evals = dict(test=dict(images, split='test[:16]', batch_size=16))
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='20', examples='')
