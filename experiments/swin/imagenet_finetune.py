r"""ImageNet-1k with Swin: 30 epochs from ImageNet-21k (the paper's 22k), or at 384 pixels.

    python -m vit_jax train experiments/swin/imagenet_finetune.py:B,size=384 \
        --config.init.from=runs/swin_b --workdir runs/swin_b_384
    python -m vit_jax train experiments/swin/imagenet_finetune.py:B,i22k \
        --config.init.from=swin_base_patch4_window7_224_22k.safetensors \
        --config.init.classes=map22kto1k.txt --workdir runs/swin_b_22k

Liu et al., 2021, arXiv:2103.14030, appendix A2.2, with the additions of the authors' code. It
starts from a run of imagenet.py, or weights of the authors, timm or transformers as safetensors;
tables of relative positions are resized for larger windows. The 1,000 classes are selected from the
head of 21,841 classes by the authors' file (data/map22kto1k.txt of microsoft/Swin-Transformer);
without `config.init.classes` the head is reinitialized.

Expected, as published, and chip-hours on TPU v3 at 40 % of its peak by `scaling plan`: B at 384
pixels 84.5 % and 61, on top of imagenet.py; from ImageNet-21k, after pre-training, B 85.2 %
and 20, L 86.3 % and 45, B at 384 pixels 86.4 % and 61, L 87.3 % and 135. The authors publish no
hours. Not measured by this project yet.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import swin

DROP_PATH = {'T': 0.2, 'S': 0.3, 'B': 0.5, 'L': 0.5}  # as in pre-training on ImageNet-1k


def get_config(
    variant: str = 'B', size: Literal[224, 384] = 224, i22k: bool = False, fast: bool = False
) -> ConfigDict:
    """The checkpoint's Swin, whether it comes from ImageNet-21k, and the size of images."""
    config = ConfigDict()
    config.total = '30 epochs'
    config.batch_size = 1024

    config.model = dict(name='swin', num_classes=placeholder(int))
    config.model.update(swin.variant(f'{variant}/w12' if size == 384 else variant))
    config.model.update(drop_path=0.2 if i22k else DROP_PATH.get(variant, 0.1))
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.init = {'from': placeholder(str)}
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)

    images = dict(source='tfds:imagenet2012')
    crop = f"inception_crop({size}, 8, 100, 'bicubic')|flip"
    config.data = dict(images, split='train')
    config.data.transforms = f'{crop}|randaugment_increasing(2, 9)|random_erasing(0.25)'
    # As in the authors' code: the center of 256 pixels, but the whole image at 384.
    center = "resize_small(256, 'bicubic')|central_crop(224)"
    transforms = "resize(384, 'bicubic')" if size == 384 else center
    config.evals = dict(val=dict(images, split='validation', transforms=transforms))

    # The authors give rates for 512 images; the whole schedule scales with the batch.
    scale = config.batch_size / 512
    config.optim = dict(name='adamw', lr=2e-5 * scale, weight_decay=1e-8, clip_norm=5.0)
    config.optim.schedule = dict(name='cosine', warmup='5 epochs')
    config.optim.schedule.update(init=2e-8 * scale, final=2e-7 * scale)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits, from scratch."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(swin.variant('mu'), depths=(1,), num_heads=(2,))
    config.init['from'] = ''
    config.data.update(source='digits', transforms='inception_crop(16)|flip')
    config.evals.val.update(source='digits', split='test', transforms='resize(16)')
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
