"""ImageNet-1k from scratch: MLP-Mixer B/16, 300 epochs.

    python -m vit_jax train --config experiments/mixer/imagenet2012.py --workdir runs/mixer_b16

Tolstikhin et al., 2021, arXiv:2105.01601, by the recipe that its authors published later:
big_vision's `mlp_mixer_i1k`. Expected, as published there for B/16: 76.3 % after 300 epochs (the
default) in 2 h 11 min on a TPU v3-128; about 70.5 % after 60, `imagenet2012.py:B/16,60ep`, in 27
minutes. Other sizes, such as `S/16`, have no published numbers with this recipe. Not measured by
this project yet.

To fine-tune the authors' checkpoints, see experiments/vit/finetune.py:auto.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError
from vit_jax.models import mixer

ARGS = ('smoke', 'B/16,60ep', 'S/32', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a Mixer variant and epochs, as in `B/16,60ep`, or `smoke` for a few steps."""
    smoke = arg == 'smoke'
    name, epochs = ('mu/4', 0) if smoke else parse(arg)
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{epochs} epochs'
    config.batch_size = 32 if smoke else 4096

    config.model = dict(name='mixer', **mixer.variant(name), dtype='bfloat16')
    config.model.update(num_classes=placeholder(int), drop_path=0.1, head_bias=-6.9)
    config.task = dict(name='classify', loss_name='sigmoid', mixup=0.5)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    config.data = dict(
        source=source,
        split='train' if smoke else 'train[:99%]',
        transforms=f"inception_crop_tf({size})|flip|randaugment(2, 15, variant='big_vision')",
    )
    center = f'resize_small_tf({size * 8 // 7})|central_crop({size})'
    test = 'test' if smoke else 'validation'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    config.optim.schedule = dict(name='linear', warmup='10%' if smoke else '10000 steps')
    config.optim.schedule.final = 1e-8
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def parse(arg: str | None) -> tuple[str, int]:
    """`'B/16,60ep'` as ('B/16', 60), which are by default B/16 and 300."""
    name, epochs = 'B/16', '300'
    for part in filter(None, (arg or '').split(',')):
        if part.endswith('ep'):
            epochs = part.removesuffix('ep')
        else:
            name = part
    if not epochs.isdecimal() or not int(epochs):
        raise UserError(f'imagenet2012.py:{arg}: write the epochs as in B/16,60ep')
    return name, int(epochs)
