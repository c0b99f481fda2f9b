r"""SigLIP B/16 on your own captioned images, or locked-image tuning of a text tower (LiT).

    python -m vit_jax vocab tar:/data/pairs.tar --field caption --size 32000 --output vocab.model
    python -m vit_jax train --config experiments/siglip/own.py --config.data.vocab=vocab.model \
        --config.data.source=tar:/data/pairs.tar --workdir runs/siglip_b16

`own.py:lit,B/16` initializes the image tower from `config.init.from`, a ViT with a class token, and
freezes it. Other sizes are selected by name, as in `own.py:S/16`. A hundredth of the pairs is held
out for retrieval.

Towers, t' = log 10, b = -10 and beta2 = 0.95 follow Zhai et al., 2023, arXiv:2303.15343. Learning
rate, warm-up, clipping and the batch of 512, and with `lit` the bias of -2.71, follow
`siglip_lit_coco.py` of google-research/big_vision. Expected: depends on the data; numbers are
published only for the authors' data, which are not public. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError
from vit_jax.models import siglip

ARGS = ('smoke', 'B/16', 'lit,B/16', 'S/16', ...)
# A ViT without its head.
PARTS = ('patch_embed', 'cls_token', 'pos_embed', 'encoder')
SELECT = ','.join(f'{part}->image/{part}' for part in PARTS)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT, or `lit` and a ViT; `smoke` for a few steps on synthetic captions."""
    smoke = arg == 'smoke'
    words = ['mu/8'] if smoke else [word for word in (arg or '').split(',') if word]
    lit = 'lit' in words
    names = [word for word in words if word != 'lit'] or ['B/16']
    if len(names) > 1:
        raise UserError(f"own.py:{arg}: write one ViT, such as B/16, and 'lit'")
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '20 epochs'
    config.batch_size = 16 if smoke else 512

    config.model = dict(name='siglip', vocab_size=placeholder(int), length=36 if smoke else 64)
    config.model.update(siglip.variant(names[0]), dtype='bfloat16')
    config.task = dict(name='siglip')
    if lit:
        config.model.update(pool='cls', init_bias=-2.71)
        config.task.locked_image = True
        config.init = {'from': placeholder(str), 'select': SELECT}

    # SigLIP pads with the eos, so every text ends in it; in your own vocabularies it is 2.
    transforms = f"tokenize('caption', {config.model.length}, pad=2)"
    data = dict(source='scenes_captions:160' if smoke else 'tar:pairs.tar')
    data.update(vocab='bytes' if smoke else 'vocab.model')
    data.update(transforms=transforms if smoke else f'resize(224)|{transforms}')
    config.data = dict(data, split='train' if smoke else 'train[:99%]')
    test = dict(data, split='test[:16]' if smoke else 'train[99%:]')
    config.evals = dict(test=test, retrieval=dict(test, evaluator='retrieval'))

    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.1, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='2 steps' if smoke else '3%')
    if lit:
        config.optim.freeze = ('^image/',)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '1 epoch')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
