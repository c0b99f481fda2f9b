"""ImageNet-1k from scratch with FlexiViT: one model for patches of 8 to 48 pixels.

    python -m vit_jax train experiments/vit/flexivit.py:B/16 --workdir runs/flexi

FlexiViT, arXiv:2212.08013: images of 240 pixels, and every step draws a patch size of 48 to 8
pixels, to which a kernel of 32 and 7 x 7 positions are resized. The rest is as in naflex.py,
without the paper's teacher; evaluated with patches of the variant (`val`), 30 and 8 pixels.
Expected: no number is published for it. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

SIDES = (48, 40, 30, 24, 20, 16, 15, 12, 10, 8)  # patch sizes


def get_config(variant: str = 'S/16', epochs: int = 90, fast: bool = False) -> ConfigDict:
    """A ViT and the length of its training; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='naflex', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(pool='gap', representation_size=config.model.width)
    config.model.update(kernel_size=32, pos_grid=7)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='classify')

    images = dict(source='tfds:imagenet2012')
    augment = "inception_crop_tf(240)|flip|randaugment(2, 10, variant='big_vision')"
    config.data = dict(images, split='train[:99%]', transforms=augment, plan=plan(240, *SIDES))
    images.update(transforms='resize_small_tf(274)|central_crop(240)')
    val = dict(images, split='validation')
    usual = plan(240, config.model.patch_size)
    config.evals = dict(
        val=dict(val, plan=usual),
        minival=dict(images, split='train[99%:]', plan=usual),
        val_30=dict(val, plan=plan(240, 30)),
        val_8=dict(val, plan=plan(240, 8)),
    )

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10000 steps')
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def plan(size: int, *sides: int) -> str:
    """The plan of patches of these sizes in pixels, which all tile images of `size` pixels."""
    return f'patches(patch_size={sides}, lengths={tuple((size // n) ** 2 for n in sides)})'


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), representation_size=32, kernel_size=4, pos_grid=4)
    data = dict(source='digits', transforms='resize(16)', plan=plan(16, 4))
    config.data, config.evals = dict(data, split='train'), dict(val=dict(data, split='test'))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
