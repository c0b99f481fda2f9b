"""CIFAR-10: a linear classifier on the frozen encoder of a masked autoencoder.

    python -m vit_jax train experiments/mae/cifar10_probe.py \\
        --workdir runs/mae_cifar10_probe

He et al., 2022, arXiv:2111.06377, appendix A.1: LARS after a batch norm; only the head is trained.
It starts from the run of cifar10.py in `runs/mae_cifar10` (or `--config.init.from=WORKDIR`).

Expected: a test accuracy of at least 0.50. Not measured; logistic regression of cifar10.py has
0.524.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = '3 epochs'
    config.batch_size = 512

    config.model = dict(name='vit', patch_size=4, width=128, depth=4, mlp_dim=256, num_heads=4)
    config.model.update(pool='patches', gelu='erf', head_norm='batch')
    config.model.num_classes = placeholder(int)
    encoder = 'patch_embed, cls_token, pos_embed, encoder'
    config.init = {'from': 'runs/mae_cifar10', 'select': encoder}
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:90%]', transforms='flip', workers=0)
    images.update(batch_size=500)
    config.evals = dict(
        val=dict(images, split='train[90%:]'), test=dict(images, split='test', every='100%')
    )

    config.optim = dict(name='lars', lr=0.2, momentum=0.9)
    config.optim.freeze = ('^(patch_embed|cls_token|pos_embed|encoder)(/|$)',)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='50', eval='25%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits, from scratch."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(width=32, depth=1, mlp_dim=64, num_heads=2)
    config.init['from'] = ''
    config.data.source = 'digits'
    for entry in config.evals.values():
        entry.update(source='digits', batch_size=100)
    config.every = dict(log='10', eval='20', checkpoint='20')
