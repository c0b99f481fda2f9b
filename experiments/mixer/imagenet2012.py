"""ImageNet-1k from scratch: MLP-Mixer B/16, 300 epochs.

    python -m vit_jax train experiments/mixer/imagenet2012.py --workdir runs/mixer_b16

Tolstikhin et al., 2021, arXiv:2105.01601, by the recipe that its authors published later:
big_vision's `mlp_mixer_i1k`. Expected, as published there for B/16: 76.3 % after 300 epochs (the
default) in 2 h 11 min on a TPU v3-128; about 70.5 % after 60, `imagenet2012.py:epochs=60`, in 27
minutes. Other sizes, such as `S/16`, have no published numbers with this recipe. Not measured by
this project yet. `real` and `v2` read `imagenet2012_real` and `imagenet_v2`, prepared by TFDS.

To fine-tune the authors' checkpoints, see experiments/vit/own.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import mixer


def get_config(variant: str = 'B/16', epochs: int = 300) -> ConfigDict:
    """A Mixer and the length of its training."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 4096

    config.model = dict(name='mixer', num_classes=placeholder(int), **mixer.variant(variant))
    config.model.update(drop_path=0.1, head_bias=-6.9, dtype='bfloat16')
    config.task = dict(name='classify', loss_name='sigmoid', mixup=0.5)

    images = 'tfds:imagenet2012'
    augment = "inception_crop_tf(224)|flip|randaugment(2, 15, variant='big_vision')"
    config.data = dict(source=images, split='train[:99%]', transforms=augment)
    center = dict(transforms='resize_small_tf(256)|central_crop(224)')
    config.evals = dict(
        val=dict(center, source=images, split='validation'),
        minival=dict(center, source=images, split='train[99%:]'),
        real=dict(center, source='tfds:imagenet2012_real', split='validation', evaluator='real'),
        v2=dict(center, source='tfds:imagenet_v2', split='test'),
    )

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    config.optim.schedule = dict(name='linear', warmup='10000 steps', final=1e-8)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(mixer.variant('mu/4'))
    augment = config.data.transforms.replace('224', '16')
    config.data = dict(source='digits', split='train', transforms=augment)
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
