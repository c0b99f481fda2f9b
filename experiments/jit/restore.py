r"""Images out of gray or small ones: colorization and super-resolution by JiT, without a network.

    python -m vit_jax train --config experiments/jit/restore.py:gray --workdir runs/jit_gray
    python -m vit_jax predict --workdir runs/jit_gray photo.jpg --out colors.png
    python -m vit_jax evaluate --workdir runs/jit_gray --evaluator restoration

The argument is `gray`, the default, or `small` for images whose sides are a quarter as long, of
scenes of digits at 48 pixels. `gray,cifar10` and `small,cifar10` learn from CIFAR-10 at 32 pixels,
and `small,digits` from handwritten digits of 8 pixels, of which 2 x 2 pixels are given.

Expected: samples that fit what is given, and differ where it leaves a choice. Where colors or
details are uncertain, a sample is farther from the original than what is given, which lies in the
middle of what is possible. Measured PSNR of a sample and of what is given, in dB, after 4 to 5
minutes of CPU time of an Intel Xeon (1.5 with digits), on 300 test images, 600 of CIFAR-10:
`small,digits` 12.1 and 8.9, `small` 24.0 and 23.4, `small,cifar10` 19.8 and 20.2, `gray` 20.3 and
21.8, `gray,cifar10` 21.0 and 25.5. Samples are in docs/generation.md; experiments/README.md has
other colorizers beside `gray,cifar10`.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest
from vit_jax.tasks.image_to_image import GRAY, SMALL

KINDS = (GRAY, SMALL)
# Source of images, the transforms that prepare them, and a patch size.
DATA = {
    '': ('scenes', "keep('image')|resize(48)", 6),
    'cifar10': ('tfds:cifar10', '', 4),
    'digits': ('digits', '', 2),
}
ARGS = ('smoke', *KINDS, *(f'{kind},cifar10' for kind in KINDS), 'small,digits')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: what is given and the data, as in `gray,cifar10`; `smoke` for a few small steps."""
    smoke = arg == 'smoke'
    if arg not in (None, *ARGS):
        raise UserError(f'restore.py:{arg}: {nearest("argument", arg, ARGS)}')
    given, _, data = (GRAY if smoke else arg or GRAY).partition(',')
    source, seen, patch_size = DATA[data]
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '40000 examples'
    config.batch_size = 16 if smoke else 64

    size = dict(width=96, depth=4, mlp_dim=256, num_heads=4, bottleneck=48)
    if smoke:
        size = dict(width=32, depth=2, mlp_dim=64, num_heads=2, bottleneck=8)
    config.model = dict(name='jit', patch_size=patch_size, **size)
    config.model.update(context_tokens=0, context_start=0, num_classes=placeholder(int))
    config.task = dict(name='image_to_image', given=given, steps=4 if smoke else 25, samples=3)

    images = dict(source='scenes:160' if smoke else source, workers=0, cache=bool(data))
    config.data = dict(images, split='train', transforms=seen)
    images.update(transforms=seen, batch_size=16 if smoke else 100)
    config.evals = dict(test=dict(images, split='test[:16]' if smoke else 'test[:300]'))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.95, weight_decay=0.0, clip_norm=1.0)
    config.optim.schedule = dict(name='constant', warmup='5%')
    config.step = dict(accum_steps=1, ema_decay=0.9 if smoke else 0.99)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '25%')
    config.every.checkpoint = '20' if smoke else '10%'
    config.every.examples = '' if smoke else '50%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
