r"""ImageNet-1k from scratch, 300 epochs: augmentation and regularisation as in AugReg.

    python -m vit_jax train --config experiments/vit/augreg.py:B/16,medium2 --workdir runs/augreg

Steiner et al., 2022, "How to train your ViT?", arXiv:2106.10270. Seven levels of RandAugment and
mixup: none, light1, light2, medium1, medium2, strong1, strong2. The paper crosses them with
dropout and stochastic depth, both 0 (here the default) or both 0.1, and with a weight decay of
0.1 (the default) or 0.03:

    --config.model.dropout=0.1 --config.model.drop_path=0.1 --config.optim.weight_decay=0.03

Expected for B/16 with `medium2`: about 79 %, as the authors of big_vision say of this recipe
(github.com/google-research/big_vision/issues/7); the paper's figure 4 shows the other combinations,
without numbers. No hours are published. Not measured by this project yet. The head is linear: the
paper leaves out the hidden layer of the ViT paper.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest
from vit_jax.models import vit

# level: RandAugment's layers and magnitude, mixup. Magnitude 0 does change images.
LEVELS = {
    'none': ('', 0.0),
    'light1': ('|randaugment(2, 0)', 0.0),
    'light2': ('|randaugment(2, 10)', 0.2),
    'medium1': ('|randaugment(2, 15)', 0.2),
    'medium2': ('|randaugment(2, 15)', 0.5),
    'strong1': ('|randaugment(2, 20)', 0.5),
    'strong2': ('|randaugment(2, 20)', 0.8),
}
ARGS = ('smoke', 'mu/16,none', 'S/32,light2', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant and a level, as `S/16,light2`; `smoke` for a few steps on digits."""
    smoke = arg == 'smoke'
    name, _, level = ('mu/4' if smoke else arg or 'B/16').partition(',')
    level = level or 'medium2'
    if level not in LEVELS:
        raise UserError(f'augreg.py:{arg}: ' + nearest('level', level, LEVELS))
    randaugment, mixup = LEVELS[level]
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '300 epochs'
    config.batch_size = 32 if smoke else 4096

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(name))
    config.model.update(dropout=0.0, drop_path=0.0, dtype='bfloat16')
    config.task = dict(name='classify', mixup=mixup)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    config.data = dict(
        source=source,
        split='train' if smoke else 'train[:99%]',
        transforms=f'inception_crop({size})|flip{randaugment}',
        workers=0 if smoke else 16,
    )
    center = f'resize_small({size * 8 // 7})|central_crop({size})'
    test = 'test' if smoke else 'validation'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10%' if smoke else '10000 steps')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='10' if smoke else '5 epochs')
    config.every.checkpoint = '10' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
