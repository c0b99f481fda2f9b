"""CIFAR-10 in one step: pMF with two heads, tokens for conditions, and Muon.

    python -m vit_jax train experiments/meanflow/cifar10.py --workdir runs/meanflow_cifar10
    python -m vit_jax sample runs/meanflow_cifar10 --count 10 --guidance 2 --out cifar10.png
    python -m vit_jax evaluate runs/meanflow_cifar10 --split test \
        --evaluator "frechet(features='runs/cifar10')"

Lu et al., 2026, arXiv:2601.22158, in the size of `experiments/jit/cifar10.py`. The features of the
Frechet distance are a classifier's, a run of `experiments/vit/cifar10.py`. Expected: colors and
outlines of the classes. The recipe as it stands is not measured; a smaller model after 215 steps
stays far behind JiT's (experiments/README.md).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(patch_size: int = 4, epochs: int = 6) -> ConfigDict:
    """The recipe, with the side of patches in pixels and the number of epochs."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 128

    config.model = dict(name='pmf', patch_size=patch_size, width=128, depth=6, head_depth=2)
    config.model.update(mlp_dim=341, num_heads=4, bottleneck=64, num_classes=placeholder(int))
    config.task = dict(name='meanflow', guidance=2.0)

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train', transforms='flip', workers=0)
    config.evals = dict(test=dict(images, split='test', batch_size=100))

    config.optim = dict(name='muon', lr=1e-3, b2=0.95, weight_decay=0.0)
    config.optim.schedule = dict(name='constant', warmup='5%')
    config.step = dict(ema_decay=0.999)
    config.every = dict(log='50', eval='1 epoch', checkpoint='500', examples='25%')
    config.checkpoint = dict(keep_last=2)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(patch_size=2, width=32, depth=2, head_depth=1, mlp_dim=64, bottleneck=8)
    config.data.source = config.evals.test.source = 'digits'
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='20', checkpoint='20', examples='')
