r"""Colorization of gray CIFAR-10 images by classification.

    python -m vit_jax colors tfds:cifar10 --split 'train[:90%]' --out colors.json
    python -m vit_jax train experiments/colorization/cifar10.py \
        --config.task.prior=colors.json --workdir runs/colorize
    python -m vit_jax predict --workdir runs/colorize --out colors.png photo.jpg
    python -m vit_jax attention --workdir runs/colorize --query 3,4 --out looks.png photo.jpg

Zhang et al., 2016, arXiv:1603.08511: 313 bins of (a, b) with soft labels, rare colors weighted
more. The network differs: 64 patches of 4 x 4 pixels, each with a query that predicts 2 x 2 colors.
Without `config.task.prior` all colors weigh the same, and images become paler.

Expected before the run: `test/psnr` above `test/psnr_of_grey`, and `test/colorfulness` above half
of `test/true_colorfulness`. Measured, in about 40 minutes of one CPU core: 23.3 dB, less than the
gray images' 25.5, and 31.4 of 30.6; 20 % of the bins are correct. Weighting rare colors makes
images vivid, not accurate: after 60,000 examples (`--config.total`) 23.5 dB, 26.8 and 21 %, and
without the prior 25.7 dB, 8.9 and 28 %.

`val`, the last 5,000 training images, is for tuning.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '240000 examples'
    config.batch_size = 32

    config.model = dict(name='colorizer', patch_size=4, patch_out=2, posemb='sincos2d')
    config.model.update(width=96, depth=4, mlp_dim=192, num_heads=4, decoder_depth=2)
    config.task = dict(name='colorize')

    images = dict(source='tfds:cifar10', workers=0)
    config.data = dict(images, split='train[:90%]', transforms='flip', cache=True)
    images.update(batch_size=500)
    config.evals = dict(
        val=dict(images, split='train[90%:]'), test=dict(images, split='test', every='100%')
    )

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='50', eval='25%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, which are in color."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(width=32, depth=1, mlp_dim=64, num_heads=2, decoder_depth=1)
    resize = "keep('image')|resize(32)"
    images = dict(source='scenes:160', workers=0)
    config.data = dict(images, split='train', transforms=f'{resize}|flip')
    config.evals = dict(test=dict(images, split='test[:16]', transforms=resize, batch_size=16))
    config.every = dict(log='10', eval='20', checkpoint='20')
