"""Costs of the named sizes are those of the models themselves."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.profiling import flops, variants


@pytest.fixture(scope='module')
def vits():
    return {v.name: v for v in variants.variants(['vit'])}


@pytest.mark.slow
def test_every_shape_has_its_variant(vits):
    assert list(vits) == [f'{shape}/16' for shape in vit.VARIANTS]
    assert vits['B/16'].parameters == 86_567_656


def test_cost_is_that_of_the_plain_model(vits):
    model = vit.Model(num_classes=1000, **vit.variant('mu/16'))
    image = jnp.zeros((1, 224, 224, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    assert vits['mu/16'].parameters == sum(x.size for x in jax.tree.leaves(shapes))
    assert vits['mu/16'].gmacs * 2e9 == flops.forward_flops(model, image)


@pytest.mark.slow
def test_text_is_measured_too():
    base = next(v for v in variants.variants(['seq2seq']) if v.name == 'base')
    # Vaswani et al., 2017, table 3: 65 million with 37,000 ids, of width 512
    assert base.parameters + 5_000 * 512 == pytest.approx(65e6, rel=0.05)


def test_size_of_images_counts_and_unknown_models_are_told():
    small, large = (next(variants.variants(['vit'], size)).gmacs for size in (32, 64))
    assert small < large
    with pytest.raises(UserError, match="unknown model 'vot'; did you mean 'vit'"):
        list(variants.variants(['vot']))
