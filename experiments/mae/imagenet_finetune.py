"""ImageNet-1k: fine-tuning of a masked autoencoder, as in the MAE paper.

    python -m vit_jax train experiments/mae/imagenet_finetune.py \\
        --config.init.from=runs/mae_b16 --workdir runs/mae_b16_finetuned

He et al., 2022, arXiv:2111.06377, table 9: layer-wise decay, mixup and cutmix, the mean patch
token, then a norm. `config.init.from` is a run of imagenet.py, or a checkpoint of transformers or
the authors, as safetensors. Differences from the paper: pixels are in [-1, 1], not normalized by
ImageNet's mean and standard deviation.

Expected, as published after 1,600 epochs of pre-training: 83.6 % (B/16), 85.9 % (L/16) and 86.9 %
(H/14). Not measured by this project yet. Planned (`scaling plan`; TPU v3 at 40 % of its peak): B/16
13.4 exaFLOPs and 75 chip-hours, L/16 23.4 and 132.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

# By size: epochs, learning rate per 256 images, layer-wise decay, drop path.
SIZES = {
    'B/16': (100, 5e-4, 0.65, 0.1),
    'L/16': (50, 1e-3, 0.75, 0.2),
    'H/14': (50, 1e-3, 0.75, 0.3),
}


def get_config(variant: Literal['B/16', 'L/16', 'H/14'] = 'B/16', fast: bool = False) -> ConfigDict:
    """The checkpoint's ViT; `fast` keeps the residual stream in bfloat16."""
    epochs, lr, layer_decay, drop_path = SIZES[variant]
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(pool='patches', gelu='erf', fc_norm=True, drop_path=drop_path)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    blocks = 'patch_embed, cls_token, pos_embed, encoder/block_*'
    config.init = {'from': placeholder(str), 'select': blocks}
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)

    images = dict(source='tfds:imagenet2012')
    crop = "inception_crop(224, 8, 100, 'bicubic')|flip"
    config.data = dict(images, split='train[:99%]')
    config.data.transforms = f'{crop}|randaugment_increasing(2, 9)|random_erasing(0.25)'
    images.update(transforms="resize_small(256, 'bicubic')|central_crop(224)")
    config.evals = dict(
        minival=dict(images, split='train[99%:]'), val=dict(images, split='validation')
    )

    config.optim = dict(name='adamw', lr=4 * lr, weight_decay=0.05, layer_decay=layer_decay)
    config.optim.schedule = dict(name='cosine', warmup='5 epochs', final=1e-6)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits, from scratch."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'))
    config.init = {'from': ''}
    config.data.update(source='digits', transforms='flip')
    config.evals = dict(val=dict(source='digits', split='test'))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
