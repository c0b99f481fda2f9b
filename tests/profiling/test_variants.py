"""Costs of the named sizes are those of the models themselves."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from vit_jax.errors import modules
from vit_jax.models import vit
from vit_jax.profiling import flops, variants
from vit_jax.profiling.variants import count


@pytest.fixture(scope='module')
def table():
    return variants.read_table()


def test_the_table_has_every_shape_of_every_model(table):
    assert [v.name for v in table['vit']] == [f'{shape}/16' for shape in vit.VARIANTS]
    for model in modules(variants.PACKAGE):
        shapes = getattr(importlib.import_module(f'{variants.PACKAGE}.{model}'), 'VARIANTS', ())
        names = [v.name for v in table[model]]
        assert len(names) == len(shapes), 'run `make docs`'
        assert all(n.startswith(s) for n, s in zip(names, shapes, strict=True)), 'run `make docs`'
    assert {v.name: v.parameters for v in table['vit']}['B/16'] == 86_567_656


@pytest.mark.parametrize(
    'model',
    [
        pytest.param(m, marks=pytest.mark.slow if m == 'seq2seq' else pytest.mark.long)
        for m in modules(variants.PACKAGE)
    ],
)
def test_the_table_is_what_is_counted(table, model):
    assert list(count(model, variants.IMAGE_SIZE)) == table[model], 'run `make docs`'


def test_cost_is_that_of_the_plain_model(table):
    model = vit.Model(num_classes=1000, **vit.variant('mu/16'))
    image = jnp.zeros((1, 224, 224, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    (mu,) = (v for v in table['vit'] if v.name == 'mu/16')
    assert mu.parameters == sum(x.size for x in jax.tree.leaves(shapes))
    assert mu.gmacs * 2e9 == flops.forward_flops(model, image)


def test_text_is_measured_too(table):
    base = next(v for v in table['seq2seq'] if v.name == 'base')
    # Vaswani et al., 2017, table 3: 65 million with 37,000 ids, of width 512
    assert base.parameters + 5_000 * 512 == pytest.approx(65e6, rel=0.05)


def test_size_of_images_counts():
    small, large = (next(count('vit', size)).gmacs for size in (32, 64))
    assert small < large
