"""ImageNet without labels or a teacher: LeJEPA with a ViT-L/14, 100 epochs.

    python -m vit_jax train experiments/lejepa/imagenet.py --workdir runs/lejepa_l14

Balestriero and LeCun, 2025, arXiv:2511.08544, and the authors' repository: 2 global views of 224
pixels and 6 local ones of 98, AdamW at 5e-4 with decay 0.05, cosine to a thousandth. Expected, as
published for ViT-L: a mean linear accuracy of 79.5 over eight data sets. Not measured. Weights of
SIGReg from 0.02 to 0.05 are published; reproductions dispute the numbers. By `preflight`, a step
takes at least 140 ms and 11.9 GiB a chip on v5e:8x8, all epochs 308 chip-hours.
"""

from typing import Literal

from ml_collections import ConfigDict

from vit_jax.models import vit


def get_config(
    variant: Literal['S', 'B', 'L'] = 'L', epochs: int = 100, sigreg: float = 0.02
) -> ConfigDict:
    """The recipe, with a size of the ViT, the number of epochs and the weight of SIGReg."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 1024

    config.model = dict(vit.variant(f'{variant}/14'), name='lejepa', drop_path=0.1)
    config.model.update(dtype='bfloat16', residual_dtype='float32')
    config.task = dict(name='lejepa', sigreg=sigreg)
    config.task.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train[:99%]', transforms=views(224, 98, 6))
    probe = dict(images, evaluator='linear_probe', split='validation', fit='train[:100 per class]')
    config.evals = dict(
        knn=dict(images, evaluator='knn', split='train[99%:]', fit='train[:100 per class]'),
        probe=dict(probe, every='100%'),
    )
    for entry in config.evals.values():
        entry.transforms = "resize_small(256, 'bicubic')|central_crop(224)"

    config.optim = dict(name='adamw', lr=5e-4, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10 epochs', final=5e-7)
    config.every = dict(log='50', eval='10 epochs', checkpoint='1000')
    config.checkpoint = dict(keep_last=2)
    return config


def views(side: int, local: int, count: int) -> str:
    """Two global crops of 30 to 100 % of the image and `count` local ones of 5 to 30 %."""
    colors = 'flip|color_jitter()|random_gray()|gaussian_blur()|solarize()'
    return (
        f"views('local_image', {count}, 'inception_crop({local}, 5, 30)|{colors}')|"
        f"views('image', 2, 'inception_crop({side}, 30)|{colors}')"
    )


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model = dict(name='lejepa', patch_size=2, width=16, depth=1, mlp_dim=32, num_heads=2)
    config.model.update(projector=(16,), projection=8)
    config.task.update(directions=16, mean=(), std=())
    config.data.update(source='digits', split='train', transforms=views(8, 4, 2))
    for entry in config.evals.values():
        entry.update(source='digits', transforms='', fit='train[:30 per class]')
    config.evals.knn.split = 'train[90%:]'
    config.evals.probe.split = 'test'
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
