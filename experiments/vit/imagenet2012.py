r"""ImageNet-1k from scratch: ViT-S/16, the plain recipe of Beyer et al. 2022.

    python -m vit_jax train --config experiments/vit/imagenet2012.py --workdir runs/i1k
    python -m vit_jax train --config experiments/vit/imagenet2012.py:S/16,300ep \
        --workdir runs/i1k_300

"Better plain ViT baselines for ImageNet-1k", arXiv:2205.01580. Expected, as published there for
S/16: 76.5 % after 90 epochs (the default) in 6.5 hours on a TPU v3-8; 78.5 % after 150 and 80.0 %
after 300, proportionally 11 and 22 hours. Not measured by this project yet. Other variants, such as
`B/16`, have no published numbers with this recipe.

With a linear head, `--config.model.representation_size=0`, the paper reports 76.7, 78.6 and 79.8 %.
Matmuls are in bfloat16, the default precision of TPUs for the paper's float32, and the residual
stream in float32; `S/16,fast` makes it bfloat16 too. docs/recipes.md has the rest.

    python -m vit_jax train --config experiments/vit/imagenet2012.py:vit5 --workdir runs/vit5

ViT-5, Wang et al., 2026, arXiv:2602.08071: RMSNorm, also of queries and keys, layer scale,
registers, learned and rotary positions, no biases in queries, keys and values; 800 epochs of DeiT
III's recipe. `vit5` is S/16; `vit5,B/16` and `vit5,L/16` (400 epochs) train at 192 pixels.
Expected, as published by the authors (github.com/wangf3014/ViT-5): 82.2 % for S/16, 84.2 % for B/16
and 84.9 % for L/16, the latter two after 20 more epochs at 224 pixels, which are also listed for
S/16. The hours are not published. Not measured by this project yet.

    python -m vit_jax train --config experiments/vit/imagenet2012.py:naflex,B/16 \
        --workdir runs/naflex

NaFlex, arXiv:2502.14786, section 2.4.2: images keep their aspect ratio, and every step draws a
length of 64, 128, 196 or 256 patches for its batch. The rest is the plain recipe with learned
positions and without mixup, which needs images of one size. No number is published for it. Not
measured by this project yet.

    python -m vit_jax train --config experiments/vit/imagenet2012.py:flexi,B/16 \
        --workdir runs/flexi

FlexiViT, arXiv:2212.08013: images of 240 pixels, and every step draws a patch size of 48 to 8
pixels, to which a kernel of 32 and 7 x 7 positions are resized. The rest is as in `naflex`, without
the paper's teacher; evaluated with patches of 16 (`val`), 30 and 8 pixels. No number is published
for it. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError
from vit_jax.models import vit

ARGS = (
    'smoke',
    'S/16,150ep',
    'B/16,300ep,fast',
    'vit5',
    'vit5,B/16',
    'naflex,B/16',
    'flexi,B/16',
    ...,
)
# Image size, epochs, learning rate and stochastic depth.
VIT5 = {
    'S/16': (224, 800, 4e-3, 0.05),
    'B/16': (192, 800, 3e-3, 0.2),
    'L/16': (192, 400, 3e-3, 0.35),
}
NAFLEX = (64, 128, 196, 256)  # patches per sequence
FLEXI = (48, 40, 30, 24, 20, 16, 15, 12, 10, 8)  # patch sizes


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT variant, epochs, `fast`, `vit5`, `naflex` or `flexi`, as in `S/16,300ep`."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    vit5 = 'vit5' in (arg or '').split(',')
    name, epochs = parse(arg)
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{epochs or 90} epochs'
    config.batch_size = 32 if smoke else 1024

    config.model = dict(name='vit', **vit.variant('mu/4' if smoke else name))
    config.model.update(num_classes=placeholder(int), pool='gap', posemb='sincos2d')
    config.model.update(representation_size=config.model.width, **dtypes)
    config.task = dict(name='classify', mixup=0.2)

    source, size = ('digits', 16) if smoke else ('tfds:imagenet2012', 224)
    train, test = ('train', 'test') if smoke else ('train[:99%]', 'validation')
    config.data = dict(
        source=source,
        split=train,
        transforms=f"inception_crop_tf({size})|flip|randaugment(2, 10, variant='big_vision')",
    )
    center = f'resize_small_tf({size * 8 // 7})|central_crop({size})'
    config.evals = dict(val=dict(source=source, split=test, transforms=center))
    if not smoke:
        config.evals.minival = dict(source=source, split='train[99%:]', transforms=center)

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, mu_dtype='bfloat16')
    config.optim.schedule = dict(name='cosine', warmup='10%' if smoke else '10000 steps')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    if vit5:
        as_vit5(config, name, epochs)
    if 'naflex' in (arg or '').split(','):
        as_naflex(config)
    if 'flexi' in (arg or '').split(','):
        as_flexi(config)
    return config


def as_vit5(config: ConfigDict, name: str, epochs: int | None) -> None:
    """Change the model and the recipe to ViT-5's."""
    if name not in VIT5:
        raise UserError(f'imagenet2012.py: vit5 has the sizes {", ".join(VIT5)}, not {name}')
    size, published_epochs, lr, drop_path = VIT5[name]
    config.total, config.batch_size = f'{epochs or published_epochs} epochs', 2048
    config.model.update(pool='cls', posemb='learn', representation_size=None, gelu='erf')
    config.model.update(norm='rms', qk_norm='rms', layer_scale=1e-4, no_bias='query|key|value')
    config.model.update(registers=4, positions=f'rope(reference={size // 16}, registers=100.0)')
    config.model.drop_path = drop_path
    config.task.update(loss_name='sigmoid', mixup=0.8, cutmix=1.0)
    crop = f"inception_crop({size}, 8, method='bicubic')"
    config.data.transforms = f'{crop}|flip|three_augment|color_jitter(0.3, 0.3, 0.3, 0, 1)'
    for entry in config.evals.values():
        entry.transforms = f"resize_small({size}, 'bicubic')|central_crop({size})"
    config.optim = dict(name='lamb', lr=lr, eps=1e-8, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5 epochs', init=1e-6, final=1e-5)


def as_naflex(config: ConfigDict) -> None:
    """Change the model and the data to patch sequences of images of any aspect ratio."""
    side = config.model.patch_size
    plan = f'patches(patch_size={side}, lengths={{}})'
    fit = f'fit_patches({side}, {NAFLEX[-1]})'
    config.model.update(name='naflex', posemb='learn')
    config.task.mixup = 0.0
    augment = "flip|randaugment(2, 10, variant='big_vision')"
    config.data.update(transforms=f'crop_area(5)|{fit}|{augment}', plan=plan.format(NAFLEX))
    for entry in config.evals.values():
        entry.update(transforms=fit, plan=plan.format(NAFLEX[-1:]))


def as_flexi(config: ConfigDict) -> None:
    """Change the model and the data to patches of a size drawn at each step."""

    def plan(*sides: int) -> str:
        return f'patches(patch_size={sides}, lengths={tuple((240 // n) ** 2 for n in sides)})'

    config.model.update(name='naflex', posemb='learn', kernel_size=32, pos_grid=7)
    config.task.mixup = 0.0
    augment = "flip|randaugment(2, 10, variant='big_vision')"
    config.data.update(transforms=f'inception_crop_tf(240)|{augment}', plan=plan(*FLEXI))
    for entry in config.evals.values():
        entry.update(transforms='resize_small_tf(274)|central_crop(240)')
        entry.plan = plan(config.model.patch_size)
    for side in (30, 8):
        config.evals[f'val_{side}'] = dict(config.evals.val, plan=plan(side))


def parse(arg: str | None) -> tuple[str, int | None]:
    """`'B/16,150ep'` as ('B/16', 150); S/16 and None by default."""
    name, epochs = 'S/16', '0'
    for part in filter(None, (arg or '').split(',')):
        if part.endswith('ep'):
            epochs = part.removesuffix('ep')
        elif part not in ('vit5', 'naflex', 'flexi'):
            name = part
    if not epochs.isdecimal():
        raise UserError(f'imagenet2012.py:{arg}: write the epochs as in S/16,300ep')
    return name, int(epochs) or None
