r"""ImageNet-1k or 21k from scratch, 300 epochs: augmentation and regularization as in AugReg.

    python -m vit_jax train --config experiments/vit/augreg.py:B/16 --workdir runs/augreg
    python -m vit_jax train --config experiments/vit/augreg.py:i21k,B/16 --workdir runs/augreg_i21k

Steiner et al., 2022, "How to train your ViT?", arXiv:2106.10270. Seven levels of RandAugment and
mixup: none, light1, light2, medium1, medium2, strong1, strong2; by default the authors' choice for
each size in google-research/big_vision. For other sizes name one, as in `augreg.py:B/16,light1` or
`augreg.py:i21k,B/8,medium2`. The paper crosses them with dropout and stochastic depth, both 0 (the
default here) or both 0.1, and with a weight decay of 0.1 (the default) or 0.03:

    --config.model.dropout=0.1 --config.model.drop_path=0.1 --config.optim.weight_decay=0.03

Expected for B/16 with `medium2`: about 79 %, according to big_vision's authors
(github.com/google-research/big_vision/issues/7); the paper's figure 4 shows the other combinations,
without numbers. On ImageNet-21k (see imagenet21k.py) they use mean pooling and no hidden layer, and
publish no number for it; the paper's released checkpoints, with published numbers, have a class
token, `--config.model.pool=cls`. No hours are published. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError, nearest
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
CHOSEN = {
    'i1k': {'Ti/16': 'light1', 'S/32': 'medium1'}
    | dict.fromkeys(('S/16', 'B/32', 'B/16', 'L/16'), 'medium2'),
    'i21k': {'Ti/16': 'none', 'S/32': 'none', 'S/16': 'light1', 'L/16': 'medium2'}
    | dict.fromkeys(('B/32', 'B/16'), 'light2'),
}
ARGS = ('smoke', 'mu/16,none', 'S/32', 'i21k,S/16,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant, a level and `fast`, as in `S/16,light2`, with `i21k` in front;
    `smoke` for digits.
    """
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    data, name, level = ('i1k', 'mu/4', 'medium2') if smoke else parse(arg or 'B/16')
    randaugment, mixup = LEVELS[level]
    large = data == 'i21k'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '300 epochs'
    config.batch_size = 32 if smoke else 4096

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(name))
    config.model.update(dropout=0.0, drop_path=0.0, **dtypes)
    config.model.posemb_std = config.model.width**-0.5
    if large:
        config.model.update(pool='gap', head_bias=-10.0)
    else:
        config.model.update(representation_size=config.model.width, head_bias=-6.9)
    config.task = dict(name='classify', loss_name='sigmoid', mixup=mixup)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    train, test = ('train', 'test') if smoke else ('train[:99%]', 'validation')
    if large:
        source, train, test = 'folder:imagenet21k', 'train[2: per class]', 'train[:2 per class]'
    config.data = dict(
        source=source,
        split=train,
        transforms=f'inception_crop_tf({size})|flip{randaugment}',
    )
    center = f'resize_small_tf({size * 8 // 7})|central_crop({size})'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke and not large:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10%' if smoke else '10000 steps')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def parse(arg: str) -> tuple[str, str, str]:
    """`'i21k,B/16'` as ('i21k', 'B/16', 'light2'): data, variant and level."""
    data, _, rest = arg.partition(',')
    data, rest = (data, rest or 'B/16') if data in CHOSEN else ('i1k', arg)
    name, _, level = rest.partition(',')
    if not level and name not in CHOSEN[data]:
        raise UserError(
            f'augreg.py:{arg}: no level was published for {name}; name one, as in {rest},light1'
        )
    level = level or CHOSEN[data][name]
    if level not in LEVELS:
        raise UserError(f'augreg.py:{arg}: ' + nearest('level', level, LEVELS))
    return data, name, level
