"""ImageNet-1k: linear probing of a masked autoencoder, as in the MAE paper.

    python -m vit_jax train experiments/mae/imagenet_probe.py \\
        --config.init.from=runs/mae_b16 --workdir runs/mae_b16_probed

He et al., 2022, arXiv:2111.06377, table 10: LARS, learning rate 0.1 per 256 images, a batch norm
before the head; all else is frozen. `config.init.from` is a run of imagenet.py, or a checkpoint of
transformers or the authors, as safetensors. Differences from the paper: pixels are in [-1, 1], not
normalized by ImageNet's mean and standard deviation, and the probe sees the mean patch token.

Expected, as published after 1,600 epochs of pre-training: 68.0 % (B/16), 75.8 % (L/16) and 76.6 %
(H/14). No hours are published. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config(variant: str = 'B/16', fast: bool = False) -> ConfigDict:
    """The checkpoint's ViT; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = '90 epochs'
    config.batch_size = 16_384

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(pool='patches', gelu='erf', head_norm='batch')
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    encoder = 'patch_embed, cls_token, pos_embed, encoder/block_*, encoder/norm'
    config.init = {'from': placeholder(str), 'select': encoder}
    config.task = dict(name='classify')

    images = dict(source='tfds:imagenet2012')
    crop = "inception_crop(224, 8, 100, 'bicubic')|flip"
    config.data = dict(images, split='train[:99%]', transforms=crop)
    images.update(transforms="resize_small(256, 'bicubic')|central_crop(224)")
    config.evals = dict(
        minival=dict(images, split='train[99%:]'), val=dict(images, split='validation')
    )

    config.optim = dict(name='lars', lr=6.4, momentum=0.9)
    config.optim.freeze = ('^(patch_embed|cls_token|pos_embed|encoder)(/|$)',)
    config.optim.schedule = dict(name='cosine', warmup='10 epochs')
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
