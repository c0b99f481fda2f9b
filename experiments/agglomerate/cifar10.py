r"""CIFAR-10: a small ViT learns from DINOv2 and from a classifier of ImageNet at once.

    python -m vit_jax standardize hf://facebook/dinov2-small tfds:cifar10 \
        --split 'train[:2000]' --image-size 112 --out dinov2.npz
    python -m vit_jax standardize hf://google/vit-base-patch16-224 tfds:cifar10 \
        --split 'train[:2000]' --image-size 112 --out classifier.npz
    python -m vit_jax train experiments/agglomerate/cifar10.py --workdir runs/agglomerate_cifar10

AM-RADIO (arXiv:2312.06709) with PHI-S (arXiv:2410.01680): cosines of representations and patches,
and 0.1 of a smooth L1 loss of patches, which are standardized. `only=0` or `only=1` has one of the
teachers. Other teachers: `--config.task.teachers`, with their widths in `summary_widths` and
`patch_widths`. Expected: 20 nearest neighbors above a student of DINOv2 alone. Measured
with a ViT-S/14 and a small classifier for 40,000 examples, 7 minutes of one core of an Intel Xeon,
one seed: 0.446, of the ViT-S/14 alone 0.326, of the classifier alone 0.451
(experiments/README.md). The recipe as it stands is not measured.
"""

import pathlib

from ml_collections import ConfigDict

SMOKE = pathlib.Path(__file__).parents[1] / 'distill' / 'smoke_teacher.npz'  # random, for digits
STATISTICS = pathlib.Path(__file__).with_name('smoke_statistics.npz')
TEACHERS = ('hf://facebook/dinov2-small', 'hf://google/vit-base-patch16-224')
NAMES = ('dinov2', 'classifier')
WIDTHS = (384, 768)


def get_config(only: int = -1) -> ConfigDict:
    """The recipe, with the number of the only teacher, or -1 for both."""
    chosen = (0, 1) if only < 0 else (only,)
    config = ConfigDict()
    config.total = '10 epochs'
    config.batch_size = 64

    config.model = dict(name='vit_adaptors', posemb='sincos2d', hidden=256)
    config.model.update(patch_size=4, width=64, depth=4, num_heads=2, mlp_dim=128)
    config.model.summary_widths = config.model.patch_widths = tuple(WIDTHS[i] for i in chosen)
    config.task = dict(name='agglomerate', sizes=(112,) * len(chosen))
    config.task.teachers = tuple(TEACHERS[i] for i in chosen)
    config.task.names = tuple(NAMES[i] for i in chosen)
    config.task.statistics = tuple(f'{name}.npz' for name in config.task.names)

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:96%]', transforms='pad_and_crop(2)|flip', workers=0)
    config.evals = dict(
        mirrored=dict(images, split='train[96%:]', batch_size=500),
        knn=dict(images, evaluator='knn', split='train[96%:]', fit='train[:200 per class]'),
    )

    config.optim = dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='50', eval='25%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits, with one tiny teacher at two image sizes."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(patch_size=2, width=16, depth=1, mlp_dim=32, hidden=16)
    config.model.summary_widths = config.model.patch_widths = (8, 8)
    config.task.update(teachers=(str(SMOKE),) * 2, sizes=(8, 24), names=())
    config.task.statistics = (str(STATISTICS), '')
    config.data.update(source='digits', transforms='pad_and_crop(1)')
    for entry in config.evals.values():
        entry.update(source='digits', batch_size=100)
    config.evals.mirrored.split = 'test'
    config.evals.knn.update(split='train[90%:]', fit='train[:30 per class]')
    config.every = dict(log='10', eval='20', checkpoint='20')
