r"""SigLIP 2 as published, on captioned images of your own: WebLI is private.

    python -m vit_jax train experiments/siglip2/webli.py:B/16 \
        --config.data.source=tar:/data/pairs.tar --config.data.vocab=/data/tokenizer.json \
        --workdir runs/siglip2_b16
    python -m vit_jax train experiments/siglip2/webli.py:B/16,naflex \
        --config.data.source=tar:/data/pairs.tar --config.data.vocab=/data/tokenizer.json \
        --config.init.from=runs/siglip2_b16 --workdir runs/siglip2_b16_naflex

`B/16`, `L/16`, `So400m/16` or `g-opt/16`, whose text tower is So400m's. Gemma's vocabulary has
256,000 pieces; its tokenizer.json is in `google/siglip2-base-patch16-256`. `naflex` goes on from a
run for a tenth of its steps with only the loss of SigLIP, on images of any aspect ratio in 128 to
1,024 patches; the paper branches off after 90 % of a run.

Tschannen et al., 2025, arXiv:2502.14786: 40 billion examples, 32,768 a step, on up to 2,048 TPU
v5e. By `preflight`, 64 of them (v5e:8x8) hold 4,096 examples a step of B/16 with
`--config.model.remat=nothing --config.parallel.fsdp=8`; a step takes at least 387 ms. Expected for
B/16, as published for the authors' data: ImageNet, zero-shot 79.1 %. Not measured by this project.
Differences: docs/recipes.md.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import siglip2

LENGTHS = (128, 256, 576, 784, 1024)  # patches of NaFlex
LATE = '80%'  # beginning of self-distillation
# The paper's weights of self-distillation, if not 1.
WEIGHTS = {'B/16': 0.25, 'L/16': 0.5, 'g-opt/16': 0.5}
COLORS = 'flip|color_jitter()|random_gray()'
VIEWS = (
    "views('global_image', 1, 'inception_crop({}, 40)|{colors}')|"
    "views('local_image', 8, 'inception_crop({}, 5, 40)|{colors}')"
)


def get_config(variant: str = 'B/16', naflex: bool = False) -> ConfigDict:
    """A ViT; `naflex` for the last stage, on images of any aspect ratio."""
    config = ConfigDict()
    config.total = '4e10 examples'
    config.batch_size = 32_768

    config.model = dict(name='siglip2', vocab_size=placeholder(int), length=64, dtype='bfloat16')
    config.model.update(siglip2.variant(variant), scan=True, remat='dots')
    if variant == 'g-opt/16':
        text = siglip2.variant('So400m/16')
        config.model.update({key: text[key] for key in text if key.startswith('text_')})
    config.model.decoder = dict(depth=config.model.text_depth // 2)
    weight = WEIGHTS.get(variant, 1.0)
    config.task = dict(name='siglip2', start=LATE, dino=weight, ibot=weight / 4)

    data = dict(source='tar:pairs.tar', vocab='tokenizer.json')
    text = "lower('caption')|tokenize('caption', 64)"
    config.data = dict(data, split='train[:99%]')
    config.data.transforms = f'resize(256)|{text}|{VIEWS.format(256, 96, colors=COLORS)}'
    test = dict(data, split='train[99%:]', transforms=f'resize(256)|{text}')
    config.evals = dict(test=test, retrieval=dict(test, evaluator='retrieval'))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=1e-4, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='20_000 steps')
    config.optim.lr_delays = (('^(dino_head|ibot_head|mask)/', LATE),)
    config.step = dict(ema_decay=0.996, ema_start=LATE, ema_warmup=False)
    config.every = dict(log='100', eval='5%', checkpoint='1%')
    if naflex:
        use_naflex(config, text)
    return config


def use_naflex(config: ConfigDict, text: str) -> None:
    """Continue with images of any aspect ratio, without decoder and heads."""
    config.total = '4e9 examples'
    config.model.name, config.model.pos_grid = 'siglip_naflex', 16
    del config.model.decoder
    config.task = dict(name='siglip')
    config.init = {'from': placeholder(str), 'select': 'image,text,log_scale,bias'}
    config.data.update(transforms=f'fit_patches(16, {LENGTHS[-1]})|{text}')
    config.data.plan = f'patches(patch_size=16, lengths={LENGTHS})'
    for entry in config.evals.values():
        entry.transforms = f'fit_patches(16, 256)|{text}'
        entry.plan = 'patches(patch_size=16, lengths=(256,))'
    del config.optim.lr_delays
    config.step = dict()


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on synthetic captions, from scratch."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(siglip2.variant('mu/8'), length=36, scan=False)
    text = "tokenize('caption', 36)"
    views = f'{VIEWS.format(48, 24, colors=COLORS)}|'
    if config.model.name == 'siglip2':
        config.model.decoder = dict(depth=1)
        config.model.prototypes = dict(image=16, patch=8, hidden=16, bottleneck=8)
    else:
        config.model.pos_grid, config.init = 6, {'from': ''}
        text, views = f'fit_patches(8, 36)|{text}', ''
        for entry in (config.data, *config.evals.values()):
            entry.plan = 'patches(patch_size=8, lengths=(36,))'
    for entry in (config.data, *config.evals.values()):
        entry.update(source='scenes_captions:160', split='test[:16]', vocab='bytes')
        entry.transforms = text
    config.data.update(split='train', transforms=views + text)
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
