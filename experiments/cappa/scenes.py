r"""CapPa on captions of colored digits: from scratch on a CPU, without download.

    python -m vit_jax vocab scenes_captions --field caption --size 100 --kind bpe \
        --out scenes_captions.model
    python -m vit_jax train experiments/cappa/scenes.py --workdir runs/cappa

Images and vocabulary as in `experiments/siglip/scenes.py`; a ViT of width 64 with 2
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


def get_config(cap: bool = False) -> ConfigDict:
    """CapPa, or `cap` for causal captioning only."""
    config = ConfigDict()
    config.total = '10 epochs'
    config.batch_size = 64

    config.model = dict(name='cappa', vocab_size=placeholder(int), length=10, patch_size=8)
    config.model.update(width=64, mlp_dim=256, num_heads=2, depth=2, decoder_depth=1)
    config.model.mask_token = not cap
    config.task = dict(name='caption', parallel=0.0 if cap else 0.75)

    data = dict(source='scenes_captions:10000', cache=True, vocab='scenes_captions.model')
    data.update(transforms="tokenize('caption', 10)")
    config.data, test = dict(data, split='train'), dict(data, split='test')
    single = dict(test, source='scenes_captions:digit')
    config.evals = dict(
        test=test,
        single=single,
        probe=dict(single, evaluator='linear_probe', fit='train[:2000]'),
        captions=dict(test, evaluator='bleu', reference='caption'),
    )

    config.optim = dict(name='adamw', lr=2e-3, weight_decay=1e-4, clip_norm=1.0, b2=0.95)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='50', eval='5 epochs', checkpoint='5 epochs')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model, on the bytes of captions."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(length=36, width=16, mlp_dim=64, depth=1)
    config.data.source = 'scenes_captions:160'
    for entry in (config.data, *config.evals.values()):
        entry.update(cache=False, vocab='bytes', transforms="tokenize('caption', 36)")
    for entry in config.evals.values():
        entry.split = 'test[:16]'
    config.evals.test.source = config.evals.captions.source = 'scenes_captions:160'
    config.evals.probe.fit = 'train[:160]'
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
