"""Swin v2 CR; `tests/interop/families/test_timm_swin_cr.py` compares outputs with timm's."""

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models import swin_v2_cr
from vit_jax.tree_paths import param_paths

FIELDS = {'num_classes': 3, 'patch_size': 2, 'width': 4, 'depths': (2, 1), 'num_heads': (1, 2)}


def shapes(**fields):
    model = swin_v2_cr.Model(**FIELDS, window=2, **fields)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    return {name: leaf.shape for name, leaf in param_paths(params).items()}


def test_norms_of_the_stream_come_where_they_are_named():
    plain, extra = shapes(), shapes(extra_norms=((0, 1),))
    assert extra.keys() - plain.keys() == {f'stage_0/block_1/norm3/{x}' for x in ('scale', 'bias')}
    attention = 'stage_1/block_0/attention'
    assert plain[f'{attention}/qkv/bias'] == (3, 2, 4)
    assert plain[f'{attention}/position_bias/fc1/kernel'] == (2, swin_v2_cr.HIDDEN)
    assert plain[f'{attention}/position_bias/fc2/bias'] == (2,)


def test_parameters_of_a_tiny_one_are_those_of_timm():
    """Of swinv2_cr_tiny_ns_224, as `timm.create_model` has it."""
    model = swin_v2_cr.Model(num_classes=1000, window=7, extra_norms=((0, 1), (1, 1), (2, 5)))
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    assert sum(x.size for x in jax.tree.leaves(params)) == 28_333_468


def test_a_norm_after_no_block_is_refused():
    with pytest.raises(UserError, match=r'extra_norms.*block 2.*stage 0'):
        swin_v2_cr.Model(**FIELDS, extra_norms=((0, 2),))
