r"""ImageNet-1k from scratch: ViT-S/16, the plain recipe of Beyer et al. 2022.

    python -m vit_jax train --config experiments/vit/imagenet2012.py --workdir runs/i1k
    python -m vit_jax train --config experiments/vit/imagenet2012.py:S/16,300ep \
        --workdir runs/i1k_300

"Better plain ViT baselines for ImageNet-1k", arXiv:2205.01580. Expected, as published there for
S/16: 76.5 % after 90 epochs (the default) in 6.5 hours on a TPU v3-8; 78.5 % after 150 and 80.0 %
after 300, in proportion 11 and 22 hours. Not measured by this project yet. Another variant,
such as `B/16`, has no published number in this recipe.

A faithful replication in PyTorch found 79.75 +- 0.07 % after 300 epochs, over three seeds
(github.com/EIFY/mup-vit).

With a linear head, `--config.model.representation_size=0`, the paper has 76.7, 78.6 and 79.8 %.
Products are in bfloat16, the default precision of TPUs for the paper's float32, and sums of the
residual stream in float32; `S/16,fast` has these in bfloat16 too. docs/recipes.md has the rest.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.precision import precision
from vit_jax.errors import UserError
from vit_jax.models import vit

ARGS = ('smoke', 'S/16,150ep', 'B/16,300ep,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant, epochs and `fast`, as `S/16,300ep`; `smoke` for digits."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    name, epochs = parse(arg)
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 32 if smoke else 1024

    config.model = dict(name='vit', **vit.variant('mu/4' if smoke else name))
    config.model.update(num_classes=placeholder(int), pool='gap', posemb='sincos2d')
    config.model.update(representation_size=config.model.width, **dtypes)
    config.task = dict(name='classify', mixup=0.2)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    train, test = ('train', 'test') if smoke else ('train[:99%]', 'validation')
    config.data = dict(
        source=source,
        split=train,
        transforms=f"inception_crop_tf({size})|flip|randaugment(2, 10, variant='big_vision')",
    )
    center = f'resize_small_tf({size * 8 // 7})|central_crop({size})'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10%' if smoke else '10000 steps')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def parse(arg: str | None) -> tuple[str, int]:
    """`'B/16,150ep'` as ('B/16', 150); S/16 and 90 where they are left out."""
    name, epochs = 'S/16', '90'
    for part in filter(None, (arg or '').split(',')):
        if part.endswith('ep'):
            epochs = part.removesuffix('ep')
        else:
            name = part
    if not epochs.isdecimal():
        raise UserError(f'imagenet2012.py:{arg}: write the epochs as in S/16,300ep')
    return name, int(epochs)
