r"""ImageNet-1k as in the MAE paper: pre-training without labels, fine-tuning, linear probing.

    python -m vit_jax train --config experiments/mae/imagenet.py:B/16,1600ep --workdir runs/mae_b16
    python -m vit_jax train --config experiments/mae/imagenet.py:B/16,finetune \
        --config.init.from=runs/mae_b16 --workdir runs/mae_b16_finetuned
    python -m vit_jax train --config experiments/mae/imagenet.py:B/16,probe \
        --config.init.from=runs/mae_b16 --workdir runs/mae_b16_probed

The argument is a ViT (B/16, L/16, H/14) and a stage: pre-training for 800 or 1600 epochs (the
default is `B/16,800ep`), `finetune`, or `probe`. `config.init.from` may also be a checkpoint of
transformers or the authors, as safetensors.

He et al., 2022, arXiv:2111.06377, tables 8 to 10. Expected, as published after 1,600 epochs of
pre-training: fine-tuned 83.6 % (B/16), 85.9 % (L/16) and 86.9 % (H/14); linear probe 68.0, 75.8
and 76.6 %. Not measured by this project yet.

Planned (`scaling plan --config experiments/mae/imagenet.py:B/16,1600ep`; TPU v3 at 40 % of its
peak): 1,600 epochs take 119, 253 and 591 exaFLOPs (B/16, L/16, H/14), or 672, 1,427 and 3,338
chip-hours; 800 epochs half of that; fine-tuning B/16 13.4 exaFLOPs and 75 chip-hours, L/16 23.4 and
132.

Differences from the paper: pixels are in [-1, 1], not normalized by ImageNet's mean and standard
deviation; the linear probe sees the mean patch token.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError
from vit_jax.models import vit

# Fine-tuning by size: epochs, learning rate per 256 images, layer-wise decay, drop path.
FINETUNING = {
    'B': (100, 5e-4, 0.65, 0.1),
    'L': (50, 1e-3, 0.75, 0.2),
    'H': (50, 1e-3, 0.75, 0.3),
    'mu': (1, 1e-3, 0.75, 0.0),
}
BLOCKS = 'patch_embed, cls_token, pos_embed, encoder/block_*'  # fine-tuned
ENCODER = f'{BLOCKS}, encoder/norm'  # a pre-trained run's ViT
STAGES = ('800ep', '1600ep', 'finetune', 'probe')
ARGS = ('smoke', 'B/16,1600ep', 'L/16,finetune,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT, a stage and `fast`, as in `L/16,finetune`; `smoke` for a few digits steps."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    name, stage = ('mu/4', '800ep') if smoke else parse(arg)
    config = base(smoke)
    make = {'finetune': finetuning, 'probe': probing}.get(stage, pretraining)
    make(config, name, dtypes)
    if make is pretraining:
        config.total = f'{stage.removesuffix("ep")} epochs'
    if smoke:
        config.total, config.batch_size = '20 steps', 32
        config.data.transforms, config.optim.schedule.warmup = 'flip', '10%'
        config.model.update(decoder_width=16, decoder_depth=1, decoder_heads=2)
    return config


def parse(arg: str | None) -> tuple[str, str]:
    """`'L/16,probe'` as ('L/16', 'probe'); B/16 and 800ep by default."""
    parts = [part for part in (arg or '').split(',') if part]
    stages = [part for part in parts if part in STAGES]
    names = [part for part in parts if part not in STAGES]
    name, stage = (names or ['B/16'])[0], (stages or ['800ep'])[0]
    if len(names) > 1 or len(stages) > 1 or name.partition('/')[0] not in FINETUNING:
        raise UserError(
            f'imagenet.py:{arg}: write B/16, L/16 or H/14, and one of {", ".join(STAGES)}'
        )
    return name, stage


def pretraining(config: ConfigDict, name: str, dtypes: dict[str, str]) -> None:
    """Table 8: lr 1.5e-4 per 256 images, cosine, no color changes."""
    config.batch_size = 4096
    config.model = dict(name='mae', **vit.variant(name), mask_ratio=0.75, **dtypes)
    config.task = dict(name='reconstruct')
    config.data.transforms = "inception_crop(224, 20, 100, 'bicubic')|flip"
    config.optim = dict(name='adamw', lr=2.4e-3, b2=0.95, weight_decay=0.05)
    config.optim.schedule = dict(name='cosine', warmup='40 epochs')


def finetuning(config: ConfigDict, name: str, dtypes: dict[str, str]) -> None:
    """Table 9: layer-wise decay, mixup and cutmix; the mean patch token, then a norm."""
    epochs, lr, layer_decay, drop_path = FINETUNING[name.partition('/')[0]]
    config.total, config.batch_size = f'{epochs} epochs', 1024
    config.model = classifier(name, dtypes, drop_path=drop_path, fc_norm=True)
    config.init = {'from': placeholder(str), 'select': BLOCKS}
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)
    crop = "inception_crop(224, 8, 100, 'bicubic')"
    config.data.transforms = f'{crop}|flip|randaugment_increasing(2, 9)|random_erasing(0.25)'
    config.optim = dict(name='adamw', lr=4 * lr, weight_decay=0.05, layer_decay=layer_decay)
    config.optim.schedule = dict(name='cosine', warmup='5 epochs', final=1e-6)


def probing(config: ConfigDict, name: str, dtypes: dict[str, str]) -> None:
    """Table 10: LARS, lr 0.1 per 256 images, a batch norm before the head; all else is frozen."""
    config.total, config.batch_size = '90 epochs', 16_384
    config.model = classifier(name, dtypes, head_norm='batch')
    config.init = {'from': placeholder(str), 'select': ENCODER}
    config.task = dict(name='classify')
    config.data.transforms = "inception_crop(224, 8, 100, 'bicubic')|flip"
    config.optim = dict(name='lars', lr=6.4, momentum=0.9)
    config.optim.freeze = ('^(patch_embed|cls_token|pos_embed|encoder)(/|$)',)
    config.optim.schedule = dict(name='cosine', warmup='10 epochs')


def classifier(name: str, dtypes: dict[str, str], **fields: float | str) -> ConfigDict:
    """The encoder as a ViT; `gelu` as in pre-training."""
    encoder = dict(name='vit', **vit.variant(name), pool='patches', gelu='erf', **dtypes)
    return ConfigDict(dict(encoder, num_classes=placeholder(int), **fields))


def base(smoke: bool) -> ConfigDict:
    """The settings shared by all stages."""
    config = ConfigDict()
    config.seed = 0
    images = dict(source='digits' if smoke else 'tfds:imagenet2012')
    config.data = dict(images, split='train[:99%]')
    center = '' if smoke else "resize_small(256, 'bicubic')|central_crop(224)"
    test = 'test' if smoke else 'validation'
    config.evals = dict(
        minival=dict(images, split='train[99%:]', transforms=center),
        val=dict(images, split=test, transforms=center),
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
