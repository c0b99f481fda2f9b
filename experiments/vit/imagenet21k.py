r"""ImageNet-21k, 90 epochs: the pre-training of the ViT paper's checkpoints.

    python -m vit_jax train experiments/vit/imagenet21k.py --workdir runs/i21k \
        --config.data.source=folder:IMAGES --config.evals.val.source=folder:IMAGES

IMAGES holds one folder of images per class, 21,843 in the release of fall 2011 (image-net.org);
TFDS lacks this dataset. The first two images of each class are held out for `val`.

Dosovitskiy et al., 2021, arXiv:2010.11929, table 3; the final learning rate, the sigmoid loss and
the head's bias come from the authors in github.com/google-research/vision_transformer/issues/2 and
34. Expected, as published: 47.88 % on their validation split for B/16, 44.04 % for B/32, 49.90 %
for L/16 (issue 62 there); on ImageNet-1k, after `finetune.py`, 83.97, 81.28 and 85.15 % (table 5).
Pre-training L/16 takes 230 TPU v3-core-days (table 2). Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit


def get_config(variant: str = 'B/16', fast: bool = False) -> ConfigDict:
    """A ViT; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = '90 epochs'
    config.batch_size = 4096

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    # With 21,843 classes a bias of 0 would give a loss of 15,000 nats at the first step.
    config.model.update(dropout=0.1, representation_size=config.model.width, head_bias=-10.0)
    config.task = dict(name='classify', loss_name='sigmoid')

    images = dict(source='folder:imagenet21k')
    crop, center = 'inception_crop_tf(224)|flip', 'resize_small_tf(256)|central_crop(224)'
    config.data = dict(images, split='train[2: per class]', transforms=crop)
    config.evals = dict(val=dict(images, split='train[:2 per class]', transforms=center))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.03, clip_norm=1.0)
    config.optim.schedule = dict(name='linear', warmup='10000 steps', final=1e-5)
    config.every = dict(log='50', eval='1 epoch', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), representation_size=32)
    config.data = dict(source='digits', split='train', transforms='inception_crop_tf(16)|flip')
    center = 'resize_small_tf(18)|central_crop(16)'
    config.evals = dict(val=dict(source='digits', split='test', transforms=center))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
