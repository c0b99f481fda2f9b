"""Slices of TPUs by the names that clouds and compilers give them."""

import sys

import pytest

from vit_jax.errors import UserError
from vit_jax.launch import cloud_tpu
from vit_jax.profiling import topology


@pytest.mark.parametrize(
    ('text', 'name', 'chips'),
    [
        ('v5e:4x4', 'v5e:4x4', 16),
        ('v5litepod-16', 'v5e:4x4', 16),
        ('tpu-v5e-8', 'v5e:2x4', 8),
        ('v6e-1', 'v6e:1x1', 1),
        ('v4-8', 'v4:2x2x1', 4),
        ('v4-32', 'v4:2x2x4', 16),
        ('v5p-128', 'v5p:4x4x4', 64),
    ],
)
def test_names(text, name, chips):
    parsed = topology.parse(text)
    assert (parsed.name, parsed.chips) == (name, chips)


@pytest.mark.parametrize('text', ['v5e', 'v5e:4', 'v5e:4x0', 'v4:2x2', 'v9-8', 'v4-7', 'v5e-0'])
def test_other_names_are_refused(text):
    with pytest.raises(UserError, match='--topology'):
        topology.parse(text)


@pytest.mark.parametrize('name', ['v4', 'v5litepod', 'v5p', 'v6e'])
def test_every_slice_that_can_be_rented_up_to_256_has_a_topology(name):
    for size in (n for n in cloud_tpu.GENERATIONS[name].sizes if n <= 256 and not n & (n - 1)):
        parsed = topology.parse(f'{name}-{size}')
        assert parsed.chips * parsed.chip.counted == size


def test_without_the_compiler_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'libtpu', None)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'pip install .vit_jax\[preflight\].'):
        topology.require_compiler()


def test_the_compiler_does_not_touch_real_tpus(monkeypatch):
    monkeypatch.setenv('TPU_VISIBLE_CHIPS', '0')
    found = topology.environment()
    assert found['JAX_PLATFORMS'] == 'cpu'
    assert 'TPU_VISIBLE_CHIPS' not in found
