r"""English to German on WMT 2014 as in "Attention is all you need": base and big.

    tfds build wmt14_translate/de-en --file_format=array_record
    python -m vit_jax vocab tfds:wmt14_translate/de-en --size 37000 --kind bpe --out wmt14.model
    python -m vit_jax train experiments/translate/wmt14.py --workdir runs/wmt14
    python -m vit_jax evaluate --workdir runs/wmt14 --average 5

Vaswani et al., 2017, arXiv:1706.03762, sections 5 and 6: 4.5 million pairs, a joint vocabulary of
37,000 pieces, 25,000 target tokens per step without padding, label smoothing 0.1, 100,000 steps of
the base model or 300,000 of the big one, `wmt14.py:big`; the learning rate is equation 3.
Computation is in bfloat16 here, in float32 there. Expected, as published: BLEU 27.3 and 28.4 on
newstest2014, with the mean of the last 5 checkpoints, 10 minutes apart, or of the last 20, after 12
hours and 3.5 days on 8 P100. Those are on tokenized text with split compounds, and higher than
sacrebleu on the raw text, the number here. Not measured by this project yet. Needs 8 devices of 16
GB; with fewer, use `--config.step.accum_steps`.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import seq2seq

# steps, checkpoints to average, and steps in 10 minutes at the published speed
LENGTHS = {'base': ('100000 steps', 5, '1400 steps'), 'big': ('300000 steps', 20, '600 steps')}


def get_config(variant: Literal['base', 'big'] = 'base') -> ConfigDict:
    """The Transformer's size."""
    config = ConfigDict()
    config.total, keep_last, interval = LENGTHS[variant]
    config.batch_size = 25_000

    config.model = dict(name='seq2seq', **seq2seq.variant(variant))
    config.model.update(vocab_size=placeholder(int), dtype='bfloat16')
    config.task = dict(name='translate', label_smoothing=0.1, beams=4, alpha=0.6, extra_len=50)

    # The dataset's own order is German, English.
    data = dict(source='tfds:wmt14_translate/de-en', transforms='swap|tokenize')
    data.update(buckets=(16, 32, 64, 128))
    config.data = dict(split='train', vocab='wmt14.model', workers=8, count='target', **data)
    config.evals = dict(
        val=dict(split='validation', **data),
        val_bleu=dict(split='validation[:500]', evaluator='bleu', every='5%', **data),
        test_bleu=dict(split='test', evaluator='bleu', every='', **data),
    )

    lr = (config.model.width * 4000) ** -0.5
    config.optim = dict(name='adam', lr=lr, b2=0.98, eps=1e-9)
    # Equation 3 counts the first update as step 1.
    config.optim.schedule = dict(
        name='rsqrt', warmup='3999 steps', timescale='4000 steps', init=lr / 4000
    )
    config.every = dict(log='100', eval='1%', checkpoint=interval)
    config.checkpoint = dict(keep_last=keep_last)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on copying digits."""
    config.total, config.batch_size = '20 steps', 256
    config.model.update(width=16, depth=1, mlp_dim=32)
    data = dict(source='synthetic:copy', buckets=(8, 16))
    config.data = dict(split='train[:500]', cache=True, **data)
    config.evals = dict(test=dict(split='test[:100]', **data))
    config.optim.schedule = dict(name='rsqrt', warmup='10 steps', timescale='10 steps')
    config.every = dict(log='10', eval='10', checkpoint='10')
