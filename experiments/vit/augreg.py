"""ImageNet-1k from scratch, 300 epochs: augmentation and regularization as in AugReg.

    python -m vit_jax train experiments/vit/augreg.py --workdir runs/augreg

Steiner et al., 2022, "How to train your ViT?", arXiv:2106.10270. Seven levels of RandAugment and
mixup, by default the authors' choice for each size in google-research/big_vision; for other sizes
name one, as in `augreg.py:B/8,level=light1`. The paper crosses them with dropout and stochastic
depth, both 0 (the default here) or both 0.1, and with a weight decay of 0.1 (the default) or 0.03:

    --config.model.dropout=0.1 --config.model.drop_path=0.1 --config.optim.weight_decay=0.03

Expected for B/16 with `medium2`: about 79 %, according to big_vision's authors
(github.com/google-research/big_vision/issues/7); the paper's figure 4 shows the other combinations,
without numbers. No hours are published. Not measured by this project yet. `real` and `v2` read
`imagenet2012_real` and `imagenet_v2`, prepared by TFDS.
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
# The authors' choice for 300 epochs, between those for 30 and 300.
CHOSEN = {'Ti/16': 'light1', 'S/32': 'medium1', 'S/16': 'medium2', 'B/32': 'medium2'}
CHOSEN |= {'B/16': 'medium2', 'L/16': 'medium2'}
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
    config.model.update(representation_size=config.model.width, head_bias=-6.9)
    config.model.posemb_std = config.model.width**-0.5
    config.task = dict(name='classify', loss_name='sigmoid', mixup=mixup)

    images = 'tfds:imagenet2012'
    augment = f'inception_crop_tf(224)|flip{randaugment}'
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
    config.model.update(vit.variant('mu/4'), representation_size=32, posemb_std=32**-0.5)
    augment = config.data.transforms.replace('224', '16')
    config.data = dict(source='digits', split='train', transforms=augment)
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
