"""CIFAR-10 without labels: masked pre-training on a CPU.

    python -m vit_jax train experiments/mae/cifar10.py --workdir runs/mae_cifar10

He et al., 2022, arXiv:2111.06377, section 4 with a small model: 45,000 training images, 8 epochs of
them, only crops and flips. It ends with logistic regression on the test images; cifar10_finetune.py
and cifar10_probe.py go on from here. `val`, the last 5,000 training images, is for tuning; all
recipes were fixed before their one run.

Expected: a linear probe with a test accuracy of at least 0.50. Measured on one busy CPU core, with
16 minutes of pre-training: linear probe 0.524, 20 nearest neighbors 0.365 (on `val`, of 2,000
labels).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '8 epochs'
    config.batch_size = 128

    config.model = dict(name='mae', patch_size=4, width=128, depth=4, mlp_dim=256, num_heads=4)
    config.model.update(decoder_width=64, decoder_depth=1, decoder_mlp_dim=128, decoder_heads=2)
    config.model.mask_ratio = 0.75
    config.task = dict(name='reconstruct')

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:90%]', workers=0)
    config.data.transforms = 'inception_crop(32, 20)|flip'
    images.update(transforms='resize(32)', batch_size=500)
    knn = dict(images, evaluator='knn', split='train[96%:]', fit='train[:200 per class]')
    probe = dict(images, evaluator='linear_probe', split='test', fit='train[:90%]', every='100%')
    config.evals = dict(
        val=dict(images, split='train[90%:]'), probe=dict(probe, c=(0.01, 1.0)), knn=knn
    )

    config.optim = dict(name='adamw', lr=1.5e-3, b2=0.95, weight_decay=0.05)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='50', eval='25%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(width=32, depth=1, mlp_dim=64, num_heads=2)
    config.model.update(decoder_width=16, decoder_mlp_dim=32)
    config.data.update(source='digits', transforms='flip')
    val = dict(source='digits', split='train[90%:]', cache=True, batch_size=100)
    config.evals = dict(val=val, knn=dict(val, evaluator='knn', fit='train[:30 per class]'))
    config.every = dict(log='10', eval='20', checkpoint='20')
