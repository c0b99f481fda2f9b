"""CLIPs with any ViT for images; `tests/interop/families/test_open_clip.py` compares outputs."""

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models import open_clip
from vit_jax.tree_paths import param_paths

SHAPE = {'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 8, 'num_heads': 2}
FIELDS = {**SHAPE, **{f'text_{k}': v for k, v in SHAPE.items() if k != 'patch_size'}}
FIELDS |= {'embed_dim': 6, 'vocab_size': 9, 'length': 4}
OPTIONS = "vit(posemb='none', positions='rope(reference=2)', mlp='swiglu(norm=True)')"


def shapes(**fields):
    model = open_clip.Model(**FIELDS | fields)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
    params = jax.eval_shape(
        model.init, jax.random.key(0), images, jax.ShapeDtypeStruct((1, 4), np.int32)
    )['params']
    return {name: leaf.shape for name, leaf in param_paths(params).items()}


def test_the_image_tower_has_options_of_its_own():
    found = shapes(image_options=OPTIONS)
    assert {'image/encoder/block_0/mlp/gate/kernel', 'image/encoder/block_0/mlp/norm/scale'} <= (
        found.keys()
    )
    assert 'image/pos_embed' not in found and 'text/pos_embed' in found


@pytest.mark.parametrize('absent', ['', 'image|text|logits'])
def test_heads_with_biases_and_without(absent):
    found = shapes(no_bias=absent)
    biases = {name for name in ('image_head/bias', 'text/head/bias', 'bias') if name in found}
    assert len(biases) == (0 if absent else 3)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'image_options': 'swin()'}, r"image_options='swin\(\)'"),
        ({'image_options': 'vit(mpl=1)'}, "'mpl'"),
        ({'image_options': "vit(mlp='x')"}, "mlp 'x'"),
        ({'image_options': 'vit(patch_size=[8, 8])'}, r'patch_size=.*: expected int'),
        ({'no_bias': 'images'}, "no_bias.*'images'.*'image'"),
        ({'eos': 12}, 'eos=12: the vocabulary has 9 ids'),
    ],
)
def test_mistakes_are_one_line(fields, message):
    with pytest.raises(UserError, match=message) as error:
        open_clip.Model(**FIELDS | fields).image_tower()
    assert '\n' not in str(error.value)
