r"""TIPSv2 at its published sizes, on captioned images of your own.

    python -m vit_jax train experiments/tips/webli.py:B/14 \
        --config.data.source=tar:/data/pairs.tar --config.data.vocab=/data/tokenizer.json \
        --workdir runs/tips_b14

`B/14`, `L/14`, `So400m/14` or `g/14`. `tokenizer.json` has up to 32,000 pieces. The class token is
contrasted with captions, the second one with their first words. If records also have synthetic
captions, as the authors', put `sample_text('short_caption', 'long_caption')` in place of
`first_words` into `config.data.transforms`: each image draws one of the two. Images have 224
pixels; the authors end with a stage of 448.

arXiv:2410.16512 and arXiv:2604.12012: 116 million images of WebLI, which are private. Sizes of
towers, texts and positions are the released models'. Rate, decay, crops, prototypes and momentum
are from `siglip2/webli.py`, not the authors'. Scores of all patches, batch x 256 x
prototypes, are held at once: choose `batch_size` and `prototypes` for your devices. By `preflight`,
a step of B/14 takes at least 2.7 s and 13.3 GiB a chip on v5e:8x8 with `--config.parallel.fsdp=8`
and `--config.model.remat=nothing` (8e9 examples at least 23,700 chip-hours). Expected: depends on
the data. Not measured by this project. Differences: docs/recipes.md.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import tips_student

TEXT_DEPTH = 12  # except So400m
GIANT = dict(width=1536, depth=40, num_heads=24, mlp_dim=4096, mlp='swiglu', embed_dim=1536)
GIANT |= dict(text_width=1536, text_num_heads=24, text_mlp_dim=6144)
COLORS = 'flip|color_jitter()|random_gray()'
VIEWS = (
    "views('global_image', 1, 'inception_crop({}, 40)|{colors}')|"
    "views('local_image', 8, 'inception_crop({}, 5, 40)|{colors}')"
)
WORDS = 8  # of a short caption
FIRST = "first_words('caption', {}, 'short_caption')"
TEXTS = (
    "lower('caption', 'short_caption')|tokenize('caption', {0})|tokenize('short_caption', {0})|"
    "keep('image', 'global_image', 'local_image', 'caption', 'short_caption')"
)


def get_config(variant: str = 'B/14') -> ConfigDict:
    """A ViT with patches of 14 pixels."""
    config = ConfigDict()
    config.total = '8e9 examples'
    config.batch_size = 16_384

    config.model = dict(name='tips_student', vocab_size=placeholder(int), length=64)
    config.model.update(tips_student.variant(variant), scan=True, remat='dots', dtype='bfloat16')
    if variant != 'So400m/14':
        config.model.text_depth = TEXT_DEPTH
    if variant == 'g/14':
        config.model.update(GIANT)
    config.model.update(init_scale=14.3)
    config.model.prototypes = dict(image=32_768, patch=8192)
    config.task = dict(name='tips', second_text='short_caption', value_range=(0.0, 1.0))

    data = dict(source='tar:pairs.tar', vocab='tokenizer.json')
    views = VIEWS.format(224, 98, colors=COLORS)
    config.data = dict(data, split='train[:99%]')
    transforms = f'resize(224)|{views}|{FIRST.format(WORDS)}|{TEXTS.format(64)}'
    config.data.transforms = transforms
    text = "resize(224)|lower('caption')|tokenize('caption', 64)|keep('image', 'caption')"
    test = dict(data, split='train[99%:]', transforms=text)
    config.evals = dict(test=test, retrieval=dict(test, evaluator='retrieval'))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=1e-4, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='20_000 steps')
    config.step = dict(ema_decay=0.996, ema_warmup=False)
    config.every = dict(log='100', eval='5%', checkpoint='1%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on synthetic captions."""
    config.total = '20 steps'
    config.batch_size = 16
    tower = dict(width=16, depth=1, num_heads=2, mlp_dim=32)
    config.model.update(tower, **{f'text_{key}': value for key, value in tower.items()})
    config.model.update(patch_size=8, length=36, embed_dim=16, scan=False)
    config.model.prototypes = dict(image=16, patch=8, hidden=16, bottleneck=8)
    text = "tokenize('caption', 36)"
    for entry in (config.data, *config.evals.values()):
        entry.update(source='scenes_captions:160', split='test[:16]', vocab='bytes')
        entry.transforms = text
    views = VIEWS.format(48, 24, colors=COLORS)
    transforms = f'{views}|{FIRST.format(3)}|{TEXTS.format(36)}'
    config.data.update(split='train', transforms=transforms)
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
