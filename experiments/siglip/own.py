r"""SigLIP B/16 on your own captioned images, or locked-image tuning of a text tower (LiT).

    python -m vit_jax vocab tar:/data/pairs.tar --field caption --size 32000 --out vocab.model
    python -m vit_jax train experiments/siglip/own.py --config.data.vocab=vocab.model \
        --config.data.source=tar:/data/pairs.tar --workdir runs/siglip_b16

`own.py:lit` initializes the image tower from `config.init.from`, a ViT with a class token, and
freezes it. Other sizes are selected by name, as in `own.py:S/16`. A hundredth of the pairs is held
out for retrieval.

Towers, t' = log 10, b = -10 and beta2 = 0.95 follow Zhai et al., 2023, arXiv:2303.15343. Learning
rate, warm-up, clipping and the batch of 512, and with `lit` the bias of -2.71, follow
`siglip_lit_coco.py` of google-research/big_vision. Expected: depends on the data; numbers are
published only for the authors' data, which are not public. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import siglip


def get_config(variant: str = 'B/16', lit: bool = False) -> ConfigDict:
    """The image tower's ViT; `lit` freezes it."""
    config = ConfigDict()
    config.total = '20 epochs'
    config.batch_size = 512

    config.model = dict(name='siglip', vocab_size=placeholder(int), length=64)
    config.model.update(siglip.variant(variant), dtype='bfloat16')
    config.task = dict(name='siglip')
    if lit:
        config.model.update(pool='cls', init_bias=-2.71)
        config.task.locked_image = True
        # A ViT without its head.
        parts = ('patch_embed', 'cls_token', 'pos_embed', 'encoder')
        select = ','.join(f'{part}->image/{part}' for part in parts)
        config.init = {'from': placeholder(str), 'select': select}

    data = dict(vocab='vocab.model')
    # SigLIP pads with the eos, so every text ends in it; in your own vocabularies it is 2.
    data.update(transforms="resize(224)|tokenize('caption', 64, pad=2)")
    config.data = dict(data, source='tar:pairs.tar', split='train[:99%]')
    test = dict(data, split='train[99%:]')  # of the training source
    config.evals = dict(test=test, retrieval=dict(test, evaluator='retrieval'))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='3%')
    if lit:
        config.optim.freeze = ('^image/',)
    config.every = dict(log='50', eval='1 epoch', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on synthetic captions, from scratch."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(siglip.variant('mu/8'), length=36)
    config.init = {'from': ''}
    for entry in (config.data, *config.evals.values()):
        entry.update(source='scenes_captions:160', split='test[:16]', vocab='bytes')
        entry.transforms = "tokenize('caption', 36, pad=2)"
    config.data.split = 'train'
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
