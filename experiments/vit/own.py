"""Your own images, one folder per class: fine-tuning of any checkpoint of a classifier.

    python -m vit_jax train experiments/vit/own.py \\
        --config.data.source=folder:/data/flowers --config.init.from=FILE --workdir runs/flowers

Model, image size and resizing come from the checkpoint, any file or run that `vit_jax.load` reads;
`own.py:size=384` uses larger images. The classes come from the data. It evaluates on their
validation split, or on a held-out fifth of each class, and trains 1,000 steps of 32 images; for
tens of thousands of images use `--config.total='20 epochs'`. `own.py:lora` trains low-rank adapters
of queries and values by AdamW instead (`config.lora`).

SGD, cosine and clipping are as in finetune.py. Expected: depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(size: int = 0, lora: bool = False) -> ConfigDict:
    """Images of `size` pixels, the checkpoint's size if 0; `lora` trains low-rank adapters."""
    config = ConfigDict()
    config.total = '1000 steps'
    config.batch_size = 32

    config.model = dict(name=placeholder(str), num_classes=placeholder(int), dtype='bfloat16')
    config.init = {'from': placeholder(str), 'posemb': 'bilinear'}
    config.task = dict(name='classify')

    # Braces are filled in from the checkpoint; None is a split of the data.
    crop, transforms = 'inception_crop({size}, method={method})', '{transforms}'
    if size:
        crop = f'inception_crop({size}, method={{method}})'
        transforms = f'{{alpha}}resize_small({size}, {{method}})|central_crop({size})'
    config.data = dict(source=placeholder(str), split=placeholder(str))
    config.data.transforms = f'{{alpha}}{crop}|flip'
    config.evals = dict(val=dict(split=placeholder(str), transforms=transforms))

    config.optim = dict(name='sgd', momentum=0.9, lr=0.003, clip_norm=1.0)
    if lora:
        config.lora = dict(rank=8, alpha=16.0)
        config.optim = dict(name='adamw', lr=1e-3, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='2%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits, from scratch."""
    config.total = '20 steps'
    config.model = dict(name='vit', patch_size=4, width=32, depth=1, mlp_dim=64, num_heads=2)
    config.model.update(num_classes=placeholder(int))
    config.init = {'from': ''}
    config.lora = dict(rank=0)
    config.data.update(source='digits', split='train', transforms='inception_crop(16)|flip')
    config.evals = dict(val=dict(split='test', transforms='resize(16)'))
    config.every = dict(log='10', eval='20', checkpoint='20')
