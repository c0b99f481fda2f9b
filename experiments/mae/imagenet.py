"""ImageNet-1k without labels: the pre-training of the MAE paper.

    python -m vit_jax train experiments/mae/imagenet.py:epochs=1600 --workdir runs/mae_b16

He et al., 2022, arXiv:2111.06377, table 8: 800 or 1,600 epochs of B/16, L/16 or H/14. Fine-tune or
probe the result by imagenet_finetune.py and imagenet_probe.py. Differences from the paper: pixels
are in [-1, 1], not normalized by ImageNet's mean and standard deviation.

Expected, as published after 1,600 epochs: fine-tuned 83.6 % (B/16), 85.9 % (L/16) and 86.9 %
(H/14). Not measured by this project yet. Planned (`scaling plan --config
experiments/mae/imagenet.py:B/16,epochs=1600`; TPU v3 at 40 % of its peak): 1,600 epochs take 119,
253 and 591 exaFLOPs (B/16, L/16, H/14), or 672, 1,427 and 3,338 chip-hours; 800 epochs half of
that.
"""

from ml_collections import ConfigDict

from vit_jax.models import vit


def get_config(variant: str = 'B/16', epochs: int = 800, fast: bool = False) -> ConfigDict:
    """A ViT and the length of its training; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 4096

    config.model = dict(name='mae', mask_ratio=0.75, **vit.variant(variant))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='reconstruct')

    images = dict(source='tfds:imagenet2012')
    crop = "inception_crop(224, 20, 100, 'bicubic')|flip"
    config.data = dict(images, split='train[:99%]', transforms=crop)
    images.update(transforms="resize_small(256, 'bicubic')|central_crop(224)")
    config.evals = dict(
        minival=dict(images, split='train[99%:]'), val=dict(images, split='validation')
    )

    config.optim = dict(name='adamw', lr=2.4e-3, b2=0.95, weight_decay=0.05)
    config.optim.schedule = dict(name='cosine', warmup='40 epochs')
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), decoder_width=16, decoder_depth=1, decoder_heads=2)
    config.data.update(source='digits', transforms='flip')
    config.evals = dict(
        minival=dict(source='digits', split='train[99%:]'), val=dict(source='digits', split='test')
    )
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
