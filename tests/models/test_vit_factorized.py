"""Positions of rows and columns; `tests/interop/families/test_timm_forms.py` compares with timm."""

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models import vit_factorized
from vit_jax.ops import resize

FIELDS = {'patch_size': 2, 'width': 8, 'depth': 1, 'mlp_dim': 8, 'num_heads': 2, 'pool': 'gap'}
MODEL = vit_factorized.Model(**FIELDS, num_classes=3)


def tables(rows, columns):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=(1, count, 8)).astype(np.float32)
        for name, count in zip(vit_factorized.TABLES, (rows, columns), strict=True)
    }


def test_each_side_has_a_table():
    images = jax.ShapeDtypeStruct((1, 4, 6, 3), np.float32)
    params = jax.eval_shape(MODEL.init, jax.random.key(0), images)['params']
    assert params['pos_embed_y'].shape == (1, 2, 8) and params['pos_embed_x'].shape == (1, 3, 8)
    assert 'pos_embed' not in params


@pytest.mark.parametrize('method', ['linear', 'linear_cropped'])
def test_tables_are_stretched_over_their_side_or_the_longer_one(method):
    old, plain = tables(3, 3), 'linear'
    found, notes = MODEL.resize_params(old, (6, 6), (6, 10), method)
    for name, side in zip(vit_factorized.TABLES, (3, 5), strict=True):
        whole = 5 if method.endswith('cropped') else side
        expected = resize.grid(old[name][0][:, None], (whole, 1), plain)[:side, 0]
        np.testing.assert_array_equal(found[name][0], expected)
    assert len(notes) == (2 if method.endswith('cropped') else 1)
    assert MODEL.resize_params(old, (6, 6), (6, 6), method) == (old, [])


def test_other_positions_are_refused():
    with pytest.raises(UserError, match="embed='sincos2d'"):
        vit_factorized.Model(**FIELDS, posemb='sincos2d')
