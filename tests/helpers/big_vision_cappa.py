"""Small CapPas of big_vision, with its own outputs, and the number of parameters of its sizes.

big_vision is no package that can be installed, so what it computes is stored. As a command this
module asks it again; `CHECKOUT` is a clone of github.com/google-research/big_vision:

    PYTHONPATH=CHECKOUT:tests python tests/helpers/big_vision_cappa.py \
        > tests/golden/big_vision_cappa.json
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / 'golden' / 'big_vision_cappa.json'
VOCAB, LENGTH, PATCH, SIZE = 7, 5, 4, (8, 12)
MODEL: dict[str, Any] = {
    **{'num_heads': 2, 'num_layers': 2, 'mlp_dim': 12, 'emb_dim': 8, 'vocab_size': VOCAB},
    **{'seq_len': LENGTH, 'patches': (PATCH, PATCH), 'decoder_num_layers': 2},
    'masking_ratio': 1.0,
}
# Widths, depths, MLPs and heads of the published ViTs with their patches.
SIZES = {
    'S/16': (384, 12, 1536, 6, 16),
    'M/16': (512, 12, 2048, 8, 16),
    'B/16': (768, 12, 3072, 12, 16),
    'L/14': (1024, 24, 4096, 16, 14),
}

NAMES = (
    ('^encoder/embedding', 'patch_embed'),
    ('^encoder/pos_embedding', 'pos_embed'),
    ('^encoder/Transformer/encoder_norm', 'encoder/norm'),
    ('^encoder/Transformer/encoderblock_', 'encoder/block_'),
    ('LayerNorm_0', 'norm1'),
    ('LayerNorm_1', 'norm2'),
    ('MultiHeadDotProductAttention_0', 'attention'),
    ('MlpBlock_0|MLP', 'mlp'),
    ('Dense_0', 'fc1'),
    ('Dense_1', 'fc2'),
    ('^pos_embedding_decoder', 'text_pos_embed'),
    ('EncDecBlock', 'block_'),
    ('LayerNorm1', 'attention_norm'),
    ('LayerNorm2', 'cross_norm'),
    ('LayerNorm3', 'mlp_norm'),
    ('SelfAttn', 'attention'),
    ('CrossAttn', 'cross'),
    ('^decoder/LayerNorm', 'decoder/norm'),
    ('^decoder/LogitsDense', 'token_head'),
)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Images [3 H W 3] and captions [3 T], the last of which have padding."""
    images = np.random.default_rng(0).normal(size=(3, *SIZE, 3)).astype(np.float32)
    return images, np.array([[3, 4, 6, 5, 2], [5, 3, 2, 0, 0], [6, 2, 0, 0, 0]], np.int32)


def parameters(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Random parameters by their names, none at its initial value."""
    rng = np.random.default_rng(1)
    made = {}
    for name, shape in sorted(shapes.items()):
        x = rng.normal(size=shape).astype(np.float32)
        made[name] = 0.3 * x + (name.endswith('scale'))
    return made


def as_ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their parameters by the names of `vit_jax.models.cappa`."""
    table = theirs['decoder/EmbedTargets/embedding']
    made = {'token_embed/embedding': table[:-1], 'mask_token': table[-1:][None]}
    for name, array in theirs.items():
        if name.endswith(('query/kernel', 'query/bias')):
            made |= _projections(name, theirs)
        elif 'EmbedTargets' not in name and not re.search('/(key|value)/', name):
            made[_renamed(name)] = array
    return made


def _renamed(name: str) -> str:
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


def _projections(query: str, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries, keys and values of a layer, joined; those of queries apart in cross-attention."""
    q, k, v = (theirs[query.replace('query', part)] for part in ('query', 'key', 'value'))
    groups = {'q': [q], 'kv': [k, v]} if 'CrossAttn' in query else {'qkv': [q, k, v]}
    axis = 1 if query.endswith('kernel') else 0
    return {
        _renamed(query).replace('query', name): np.stack(parts, axis)
        for name, parts in groups.items()
    }


def golden() -> dict[str, Any]:
    """Shapes of the parameters, logits and losses, and the numbers of parameters."""
    import flax.training.checkpoints  # noqa: F401  asks whether there is a TensorFlow
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict

    # big_vision reads and writes files by TensorFlow; none are read here.
    for name in ('tensorflow', 'tensorflow.io', 'tensorflow.io.gfile'):
        sys.modules.setdefault(name, types.ModuleType(name))
    from big_vision import utils
    from big_vision.models.proj.cappa import cappa

    jax.config.update('jax_default_matmul_precision', 'highest')
    images, ids = inputs()
    weights = (ids != 0).astype(np.float32)
    found: dict[str, Any] = {}
    for bias in (False, True):
        model = cappa.Model(**MODEL, masked_pred_prob=1.0, decoder_bias=bias)
        made = jax.eval_shape(model.init, jax.random.key(0), images, ids)['params']
        shapes = {k: list(x.shape) for k, x in flatten_dict(made, sep='/').items()}
        params = unflatten_dict(parameters(shapes), sep='/')
        one: dict[str, Any] = {'shapes': shapes}
        for name, train in (('causal', False), ('parallel', True)):
            rngs = {'dropout': jax.random.key(1)}
            logits = model.apply({'params': params}, images, ids, train=train, rngs=rngs)
            loss = utils.weighted_softmax_xent(logits=logits, labels=ids, weights=weights)
            one[name] = {'logits': np.asarray(logits).tolist(), 'loss': float(loss)}
        found['biased' if bias else 'plain'] = one
    return found | {'counts': {name: _count(cappa, *size) for name, size in SIZES.items()}}


def _count(cappa: Any, width: int, depth: int, mlp_dim: int, heads: int, patch: int) -> int:
    """The parameters of a published size for images of 224 pixels."""
    import jax

    model = cappa.Model(
        **{'num_heads': heads, 'num_layers': depth, 'mlp_dim': mlp_dim, 'emb_dim': width},
        **{'vocab_size': 32_000, 'seq_len': 64, 'patches': (patch, patch)},
        **{'decoder_num_layers': 6, 'masked_pred_prob': 0.75, 'decoder_bias': False},
    )
    image, ids = np.zeros((1, 224, 224, 3), np.float32), np.zeros((1, 64), np.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), image, ids)
    return sum(x.size for x in jax.tree.leaves(made['params']))


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
