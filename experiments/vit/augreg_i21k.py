"""ImageNet-21k from scratch, 300 epochs: augmentation and regularization as in AugReg.

    python -m vit_jax train experiments/vit/augreg_i21k.py --workdir runs/augreg_i21k

Steiner et al., 2022, arXiv:2106.10270, on the images of imagenet21k.py, with the levels of
augreg.py and the authors' choice for each size in google-research/big_vision; for other sizes name
one, as in `augreg_i21k.py:B/8,level=medium2`. There, too, mean pooling and no hidden layer; the
paper's released checkpoints, with published numbers, have a class token, `--config.model.pool=cls`.

Expected: no number or hours are published for this recipe. Not measured by this project yet.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError
from vit_jax.models import vit

# level: RandAugment's layers and magnitude, mixup. Magnitude 0 also changes images.
LEVELS = {
    'none': ('', 0.0),
    'light1': ('|randaugment(2, 0, variant="big_vision")', 0.0),
    'light2': ('|randaugment(2, 10, variant="big_vision")', 0.2),
    'medium1': ('|randaugment(2, 15, variant="big_vision")', 0.2),
    'medium2': ('|randaugment(2, 15, variant="big_vision")', 0.5),
    'strong1': ('|randaugment(2, 20, variant="big_vision")', 0.5),
    'strong2': ('|randaugment(2, 20, variant="big_vision")', 0.8),
}
# The authors' choice for 300 epochs.
CHOSEN = {'Ti/16': 'none', 'S/32': 'none', 'S/16': 'light1', 'L/16': 'medium2'}
CHOSEN |= {'B/32': 'light2', 'B/16': 'light2'}
Level = Literal['', 'none', 'light1', 'light2', 'medium1', 'medium2', 'strong1', 'strong2']


def get_config(variant: str = 'B/16', level: Level = '', fast: bool = False) -> ConfigDict:
    """A ViT and a level, the authors' if empty; `fast` keeps the residual stream in bfloat16."""
    if not level and variant not in CHOSEN:
        raise UserError(f'no level was published for {variant}; name one, such as level=light1')
    randaugment, mixup = LEVELS[level or CHOSEN[variant]]
    config = ConfigDict()
    config.total = '300 epochs'
    config.batch_size = 4096

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.model.update(pool='gap', head_bias=-10.0, posemb_std=config.model.width**-0.5)
    config.task = dict(name='classify', loss_name='sigmoid', mixup=mixup)

    images, center = 'folder:imagenet21k', 'resize_small_tf(256)|central_crop(224)'
    augment = f'inception_crop_tf(224)|flip{randaugment}'
    config.data = dict(source=images, split='train[2: per class]', transforms=augment)
    config.evals = dict(val=dict(source=images, split='train[:2 per class]', transforms=center))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10000 steps')
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), posemb_std=32**-0.5)
    augment = config.data.transforms.replace('224', '16')
    config.data = dict(source='digits', split='train', transforms=augment)
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
