"""ImageNet-1k from scratch: ViT-S/16, the plain recipe of Beyer et al. 2022.

    python -m vit_jax train experiments/vit/imagenet2012.py --workdir runs/i1k
    python -m vit_jax train experiments/vit/imagenet2012.py:epochs=300 --workdir runs/i300

"Better plain ViT baselines for ImageNet-1k", arXiv:2205.01580. Expected, as published there for
S/16: 76.5 % after 90 epochs (the default) in 6.5 hours on a TPU v3-8; 78.5 % after 150 and 80.0 %
after 300, proportionally 11 and 22 hours. Not measured by this project yet. Other variants, such as
`B/16`, have no published numbers with this recipe.

With a linear head, `--config.model.representation_size=0`, the paper reports 76.7, 78.6 and 79.8 %.
Matmuls are in bfloat16, the default precision of TPUs for the paper's float32, and the residual
stream in float32; `fast` makes it bfloat16 too. docs/recipes.md has the rest. `real`
and `v2` read `imagenet2012_real` and `imagenet_v2`, prepared by TFDS.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config(variant: str = 'S/16', epochs: int = 90, fast: bool = False) -> ConfigDict:
    """A ViT and the length of its training; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(pool='gap', posemb='sincos2d', representation_size=config.model.width)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='classify', mixup=0.2)

    images = 'tfds:imagenet2012'
    augment = "inception_crop_tf(224)|flip|randaugment(2, 10, variant='big_vision')"
    config.data = dict(source=images, split='train[:99%]', transforms=augment)
    center = dict(transforms='resize_small_tf(256)|central_crop(224)')
    config.evals = dict(
        val=dict(center, source=images, split='validation'),
        minival=dict(center, source=images, split='train[99%:]'),
        real=dict(center, source='tfds:imagenet2012_real', split='validation', evaluator='real'),
        v2=dict(center, source='tfds:imagenet_v2', split='test'),
    )

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10000 steps')
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), representation_size=32)
    augment = config.data.transforms.replace('224', '16')
    config.data = dict(source='digits', split='train', transforms=augment)
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
