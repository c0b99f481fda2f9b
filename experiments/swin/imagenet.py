r"""ImageNet-1k from scratch: Swin-T, S and B, 300 epochs.

    python -m vit_jax train experiments/swin/imagenet.py:T --workdir runs/swin_t

Liu et al., 2021, arXiv:2103.14030, appendix A2.1, with the additions of the authors' code: AdamW,
1,024 images a step, learning rate 0.001 after 20 epochs of warm-up, RandAugment, random erasing,
mixup, cutmix, label smoothing, stochastic depth by size. imagenet_finetune.py goes on at 384 pixels
and from ImageNet-21k. Matmuls are in bfloat16, the authors' in float16; in both, the residual
stream is in float32 up to the first merging, with `fast` in bfloat16.

Expected, as published, and chip-hours on TPU v3 at 40 % of its peak from `scaling plan --config
experiments/swin/imagenet.py:T --device 'TPU v3'`: T 81.3 % and 58, S 83.0 % and 114, B 83.5 % and
201. The authors publish no hours. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import swin

DROP_PATH = {'T': 0.2, 'S': 0.3, 'B': 0.5, 'L': 0.5}  # L is published only from ImageNet-21k


def get_config(variant: str = 'T', fast: bool = False) -> ConfigDict:
    """A Swin; `fast` keeps the residual stream in bfloat16."""
    config = ConfigDict()
    config.total = '300 epochs'
    config.batch_size = 1024

    config.model = dict(name='swin', num_classes=placeholder(int), **swin.variant(variant))
    config.model.update(drop_path=DROP_PATH.get(variant, 0.1))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)

    images = dict(source='tfds:imagenet2012')
    crop = "inception_crop(224, 8, 100, 'bicubic')|flip"
    config.data = dict(images, split='train')
    config.data.transforms = f'{crop}|randaugment_increasing(2, 9)|random_erasing(0.25)'
    center = "resize_small(256, 'bicubic')|central_crop(224)"
    config.evals = dict(val=dict(images, split='validation', transforms=center))

    # The authors give rates for 512 images; the whole schedule scales with the batch.
    scale = config.batch_size / 512
    config.optim = dict(name='adamw', lr=5e-4 * scale, weight_decay=0.05, clip_norm=5.0)
    config.optim.schedule = dict(name='cosine', warmup='20 epochs')
    config.optim.schedule.update(init=5e-7 * scale, final=5e-6 * scale)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(swin.variant('mu'), depths=(1,), num_heads=(2,), drop_path=0.1)
    config.data.source = config.evals.val.source = 'digits'
    config.data.transforms = config.data.transforms.replace('224', '16')
    center = "resize_small(18, 'bicubic')|central_crop(16)"
    config.evals.val.update(split='test', transforms=center)
    scale = config.batch_size / 512
    config.optim.update(lr=5e-4 * scale)
    config.optim.schedule.update(warmup='10%', init=5e-7 * scale, final=5e-6 * scale)
    config.every = dict(log='10', eval='20', checkpoint='20')
