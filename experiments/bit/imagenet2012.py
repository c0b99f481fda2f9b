"""ImageNet-1k from scratch: BiT-S, a ResNet with group norm and weight standardization.

    python -m vit_jax train experiments/bit/imagenet2012.py --workdir runs/bit_i1k

Kolesnikov et al., 2020, arXiv:1912.11370, section 4.1: SGD with momentum, batch 4096, 90 epochs,
5,000 steps of warm-up, learning rate 0.03 per 256 images, divided by ten at epochs 30, 60 and 80.
The authors publish no number for this recipe from scratch, only after fine-tuning. Expected, from
their similar comparison of norms: about 76 % for R50x1 with group norm and weight standardization.
Its hours are not published; 90 epochs of another recipe take big_vision 32 minutes on a TPU v3-128.
Not measured by this project yet. `imagenet2012.py:R101x1` selects another variant.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import bit_resnet


def get_config(variant: str = 'R50x1') -> ConfigDict:
    """A BiT-ResNet."""
    config = ConfigDict()
    config.total = '90 epochs'
    config.batch_size = 4096

    config.model = dict(name='bit_resnet', **bit_resnet.variant(variant))
    config.model.update(num_classes=placeholder(int), dtype='bfloat16')
    config.task = dict(name='classify')

    images = dict(source='tfds:imagenet2012')
    config.data = dict(images, split='train[:99%]', transforms='inception_crop_tf(224)|flip')
    images.update(transforms='resize_small_tf(256)|central_crop(224)')
    config.evals = dict(
        val=dict(images, split='validation'), minival=dict(images, split='train[99%:]')
    )

    lr = 0.03 * config.batch_size / 256
    config.optim = dict(name='sgd', momentum=0.9, lr=lr, weight_decay=1e-4)
    steps = ('30 epochs', '60 epochs', '80 epochs')
    config.optim.schedule = dict(name='stair', warmup='5000 steps', boundaries=steps)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(layers=(1,), width_factor=1)
    config.data = dict(source='digits', split='train', transforms='inception_crop_tf(16)|flip')
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.update(lr=0.03 * 16 / 256)
    config.optim.schedule.update(warmup='10%', boundaries=('50%',))
    config.every = dict(log='10', eval='20', checkpoint='20')
