r"""CapPa on captions of colored digits: from scratch on a CPU, without download.

    python -m vit_jax vocab scenes_captions --field caption --size 100 --kind bpe \
        --output scenes_captions.model
    python -m vit_jax train --config experiments/cappa/scenes.py --workdir runs/cappa

The images and the vocabulary are those of `experiments/siglip/scenes.py`; a ViT of width 64 with 2
blocks and a decoder of one block see each image 10 times. `scenes.py:cap` predicts every caption
token by token. The defaults of the model and of the task are the published CapPa B/16: 6 decoder
blocks of the ViT's shape without biases, captions of 64 ids, 0.75 of them in parallel, all of their
tokens masked. Its data, WebLI, are private; there, Adafactor with a rate of 1e-3, weight decay of
1e-4 and clipping at 1 took 366,500 batches of 8,192 images.

A caption of two digits may begin with either, and the order is random: at most 0.65 of the captions
of `test` can be written word for word. Images of `single` have one digit and one caption.

Expected: caption_accuracy of at least 0.20 on `single`. Measured: 0.248 of 500, with 0.812 of the
tokens right; colors are nearly always right, digits are not. On `test` 0.066, BLEU 21.7; a linear
probe of the digits 0.446. It took 2.6 minutes of CPU time of an Intel Xeon. `:cap` writes more
captions right, 0.356 and on `test` 0.100 with BLEU 26.1, at the same probe, 0.442; 1.5 minutes. One
seed each.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

ARGS = ('smoke', 'cap')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `cap` for causal captioning alone, `smoke` for a few steps of a tiny model."""
    smoke, parallel = arg == 'smoke', arg != 'cap'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '10 epochs'
    config.batch_size = 16 if smoke else 64

    length, width = (36, 16) if smoke else (10, 64)
    config.model = dict(name='cappa', vocab_size=placeholder(int), length=length, patch_size=8)
    config.model.update(width=width, mlp_dim=4 * width, num_heads=2, mask_token=parallel)
    config.model.update(depth=1 if smoke else 2, decoder_depth=1)
    config.task = dict(name='caption', parallel=0.75 if parallel else 0.0)

    data = dict(source='scenes_captions:160' if smoke else 'scenes_captions:10000', cache=not smoke)
    data.update(transforms=f"tokenize('caption', {length})")
    data.update(vocab='bytes' if smoke else 'scenes_captions.model')
    config.data = dict(data, split='train')
    test = dict(data, split='test[:16]' if smoke else 'test')
    single = dict(test, source='scenes_captions:digit')
    probe = dict(single, evaluator='linear_probe', fit='train[:160]' if smoke else 'train[:2000]')
    config.evals = dict(test=test, single=single, probe=probe)
    config.evals.captions = dict(test, evaluator='bleu', reference='caption')

    config.optim = dict(name='adamw', lr=2e-3, weight_decay=1e-4, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='2 steps' if smoke else '5%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '5 epochs'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
