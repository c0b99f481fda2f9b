"""ImageNet-1k from scratch with NaFlex: images of any aspect ratio in up to 256 patches.

    python -m vit_jax train experiments/vit/naflex.py:B/16 --workdir runs/naflex

NaFlex, arXiv:2502.14786, section 2.4.2: images keep their aspect ratio, and every step draws a
length of 64, 128, 196 or 256 patches for its batch. The rest is imagenet2012.py with learned
positions and without mixup, which needs images of one size. Expected: no number is published for
it. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

LENGTHS = (64, 128, 196, 256)  # patches per sequence


def get_config(variant: str = 'S/16', epochs: int = 90, fast: bool = False) -> ConfigDict:
    """A ViT and the length of its training; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='naflex', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(pool='gap', representation_size=config.model.width)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='classify')

    images = dict(source='tfds:imagenet2012')
    side, longest = config.model.patch_size, LENGTHS[-1]
    fit = f'fit_patches({side}, {longest})'
    augment = f"crop_area(5)|{fit}|flip|randaugment(2, 10, variant='big_vision')"
    config.data = dict(images, split='train[:99%]', transforms=augment)
    config.data.plan = f'patches(patch_size={side}, lengths={LENGTHS})'
    images.update(transforms=fit, plan=f'patches(patch_size={side}, lengths=({longest},))')
    config.evals = dict(
        val=dict(images, split='validation'), minival=dict(images, split='train[99%:]')
    )

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10000 steps')
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), representation_size=32, pos_grid=4)
    data = dict(source='digits', transforms='fit_patches(4, 16)')
    data.update(plan='patches(patch_size=4, lengths=(16,))')
    config.data, config.evals = dict(data, split='train'), dict(val=dict(data, split='test'))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
