"""What blocks keep for their derivative; that it changes nothing is shown by `test_blocks.py`."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.models import mae, swin, vit
from vit_jax.nn.attention import check_remat
from vit_jax.nn.blocks import Block, Encoder


@pytest.mark.parametrize(
    ('remat', 'widths'), [('dots', [16, 32, 48]), ('names', [16, 32]), ('nothing', []), (True, [])]
)
def test_each_policy_keeps_the_products_that_it_names(remat, widths, capsys):
    """Of a block of width 16: three projections are 48 wide, the hidden layer of the MLP is 32."""
    block = functools.partial(Block, num_heads=2, mlp_dim=32)
    layer = Encoder(block, 1, remat=remat, final_norm=False)
    x = jnp.zeros((2, 5, 16))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
    jax.ad_checkpoint.print_saved_residuals(lambda p: layer.apply(p, x).sum(), params)
    kept = [
        line for line in capsys.readouterr().out.splitlines() if 'from the argument' not in line
    ]
    # Under 'names' JAX lists the input of the GELU's checkpoint again; XLA keeps it once.
    kept = [line for line in kept if 'output of remat2' not in line]
    found = [re.match(r'f32\[2,5,(\d+)\] (?:output|named)', line) for line in kept]
    assert sorted(int(match[1]) for match in found if match) == widths
    assert not [line for line in kept if '[2,2,5,5]' in line], 'the weights of attention'


def test_offloading_keeps_the_named_values_on_the_host():
    block = functools.partial(Block, num_heads=2, mlp_dim=32)
    layer, x = Encoder(block, 1, remat='offload', final_norm=False), jnp.zeros((2, 5, 16))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    program = str(jax.make_jaxpr(jax.grad(lambda p: layer.apply(p, x).sum()))(shapes))
    found = re.findall(r'f32<host>\[2,5,(\d+)\] = device_put', program)
    assert sorted(map(int, found)) == [16, 32]


def test_of_configs_old_and_new():
    def remat(*overrides):
        return load.load('experiments/vit/digits.py:smoke', overrides).model.remat

    assert remat('model.remat=True') is True
    assert remat('model.remat=false') is False
    assert remat('model.remat=names') == 'names'


@pytest.mark.parametrize('model', [vit.Model, mae.Model, swin.Model])
def test_a_policy_that_there_is_not_is_one_line(model):
    with pytest.raises(UserError, match=r"remat 'dot'; .* 'dots'\?"):
        model(remat='dot')
    check_remat(True)
