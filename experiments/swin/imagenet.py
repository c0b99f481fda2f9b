r"""ImageNet-1k with Swin: from scratch, from ImageNet-21k (the paper's 22k), and at 384 pixels.

    python -m vit_jax train --config experiments/swin/imagenet.py:T --workdir runs/swin_t
    python -m vit_jax train --config experiments/swin/imagenet.py:B,384 \
        --config.init.from=runs/swin_b --workdir runs/swin_b_384
    python -m vit_jax train --config experiments/swin/imagenet.py:B,22k \
        --config.init.from=swin_base_patch4_window7_224_22k.safetensors \
        --config.init.classes=map22kto1k.txt --workdir runs/swin_b_22k

Liu et al., 2021, arXiv:2103.14030, appendix A2.1, with the additions of the authors' code. From
scratch: AdamW for 300 epochs, 1,024 images a step, learning rate 0.001 after 20 epochs of warm-up,
RandAugment, random erasing, mixup, cutmix, label smoothing, stochastic depth by size. With `384`
(windows of 12) or `22k`, separated by commas, 30 epochs of fine-tuning from `config.init.from`: a
run of this project, or weights of the authors, timm or transformers as safetensors. Relative
position tables are resized for larger windows. The 1,000 classes are selected from the head of
21,841 classes by the authors' file (data/map22kto1k.txt of microsoft/Swin-Transformer); without
`config.init.classes` the head is reinitialized.

Expected, as published, and chip-hours on TPU v3 at 40 % of its peak from

    python -m vit_jax scaling plan --config experiments/swin/imagenet.py:T --device 'TPU v3'

    T          81.3 %    58 chip-hours
    S          83.0 %   114
    B          83.5 %   201
    B,384      84.5 %    61, after those of B
    B,22k      85.2 %    20, after pre-training
    L,22k      86.3 %    45
    B,22k,384  86.4 %    61
    L,22k,384  87.3 %   135

Matmuls are in bfloat16, the authors' in float16. In both, the residual stream is in float32 up to
the first merging; with `fast`, as in `T,fast`, it is in bfloat16.

The authors publish no hours. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError, nearest
from vit_jax.models import swin

# Stochastic depth from scratch; L is published only from ImageNet-21k.
DROP_PATH = {'mu': 0.1, 'T': 0.2, 'S': 0.3, 'B': 0.5, 'L': 0.5}
FINETUNED_DROP_PATH = 0.2
PARTS = ('22k', '384')
ARGS = ('smoke', 'T', 'mu,22k,384', 'T,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: T, S, B or L, and parts: `B,22k,384,fast`; `smoke` for a few steps on digits."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    name, parts = parse('mu' if smoke else arg or 'T')
    size = 16 if smoke else 384 if '384' in parts else 224
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '30 epochs' if parts else '300 epochs'
    config.batch_size = 32 if smoke else 1024

    config.model = dict(name='swin', **swin.variant(f'{name}/w12' if '384' in parts else name))
    config.model.update(num_classes=placeholder(int), **dtypes)
    config.model.drop_path = FINETUNED_DROP_PATH if '22k' in parts else DROP_PATH[name]
    if smoke:
        config.model.update(depths=(1,), num_heads=(2,))
    if parts:
        config.init = {'from': placeholder(str)}
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.8, cutmix=1.0)

    source, test = ('digits', 'test') if smoke else ('tfds:imagenet2012', 'validation')
    crop = f"inception_crop({size}, 8, 100, 'bicubic')"
    config.data = dict(
        source=source,
        split='train',
        transforms=f'{crop}|flip|randaugment_increasing(2, 9)|random_erasing(0.25)',
    )
    config.evals = dict(val=dict(source=source, split=test, transforms=evaluated(size)))

    # The authors give rates for 512 images; the whole schedule scales with the batch.
    scale = config.batch_size / 512
    config.optim = dict(name='adamw', clip_norm=5.0)
    if parts:
        config.optim.update(lr=2e-5 * scale, weight_decay=1e-8)
        schedule = dict(warmup='5 epochs', init=2e-8 * scale, final=2e-7 * scale)
    else:
        config.optim.update(lr=5e-4 * scale, weight_decay=0.05)
        warmup = '10%' if smoke else '20 epochs'
        schedule = dict(warmup=warmup, init=5e-7 * scale, final=5e-6 * scale)
    config.optim.schedule = dict(name='cosine', **schedule)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def parse(arg: str) -> tuple[str, tuple[str, ...]]:
    """'B,22k,384' as ('B', ('22k', '384'))."""
    name, *parts = arg.split(',')
    for part in parts:
        if part not in PARTS:
            raise UserError(f'imagenet.py:{arg}: ' + nearest('part', part, PARTS))
    if name not in DROP_PATH:
        raise UserError(f'imagenet.py:{arg}: ' + nearest('Swin', name, DROP_PATH))
    return name, tuple(parts)


def evaluated(size: int) -> str:
    """224 pixels are the center of 256; 384 are the whole image, as in the authors' code."""
    if size == 384:
        return "resize(384, 'bicubic')"
    return f"resize_small({size * 8 // 7}, 'bicubic')|central_crop({size})"
