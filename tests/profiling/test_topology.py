"""Slices of TPUs by the names that clouds and compilers give them."""

import importlib.metadata
import sys

import pytest

from vit_jax.errors import UserError
from vit_jax.launch import cloud_tpu
from vit_jax.profiling import flops, topology


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
        ('tpu7x:2x2x1', 'tpu7x:2x2x1', 4),
        ('tpu7x-128', 'tpu7x:4x4x4', 64),
    ],
)
def test_names(text, name, chips):
    parsed = topology.parse_topology(text)
    assert (parsed.name, parsed.chips) == (name, chips)


@pytest.mark.parametrize(
    ('text', 'name', 'chips', 'hosts'),
    [
        ('2xv5e:4x4', '2xv5e:4x4', 32, 8),
        ('2 x v5e:4x4', '2xv5e:4x4', 32, 8),
        ('v5litepod-16 x 2', '2xv5e:4x4', 32, 8),
        ('v4-32 x4', '4xv4:2x2x4', 64, 16),
        ('1xv5e:2x2', 'v5e:2x2', 4, 1),
        ('4xv6e-8', '4xv6e:2x4', 32, 4),
    ],
)
def test_names_of_several_slices(text, name, chips, hosts):
    parsed = topology.parse_topology(text)
    assert (parsed.name, parsed.chips, parsed.hosts) == (name, chips, hosts)
    assert topology.parse_topology(parsed.name) == parsed
    assert parsed.slices * parsed.slice_chips == chips


@pytest.mark.parametrize('text', ['0xv5e:4x4', '2x2xv5e:4x4', '2xv5e:4x4 x 2', '2x'])
def test_other_numbers_of_slices_are_refused_in_one_line(text):
    with pytest.raises(UserError, match='--topology') as error:
        topology.parse_topology(text)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'text',
    [
        'v5e',
        'v5e:4',
        'v5e:4x0',
        'v4:2x2',
        'v9-8',
        'v4-7',
        'v5e-0',
        'v5e:3x3',
        'v5e:1x4',
        'v4:2x3x2',
    ],
)
def test_other_names_are_refused(text):
    with pytest.raises(UserError, match='--topology'):
        topology.parse_topology(text)


@pytest.mark.parametrize('name', ['v4', 'v5litepod', 'v5p', 'v6e', 'tpu7x'])
def test_every_slice_that_can_be_rented_up_to_256_has_a_topology(name):
    for size in (n for n in cloud_tpu.GENERATIONS[name].sizes if n <= 256 and not n & (n - 1)):
        parsed = topology.parse_topology(f'{name}-{size}')
        assert parsed.chips * parsed.chip.counted == size


def test_without_the_compiler_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'libtpu', None)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'pip install -e .\.\[preflight\].'):
        topology.require_compiler(topology.parse_topology('v5e:2x2'))


def test_without_the_compiler_of_gpus_one_line_says_how_to_install_it(monkeypatch):
    versions = dict.fromkeys(topology.GPU_PACKAGES, '0.1')

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(topology.importlib.metadata, 'version', version)
    gpus = topology.parse_topology('h100:8')
    versions['jaxlib'] = '0.2'
    with pytest.raises(UserError, match=r'pip install jax-cuda13-pjrt==0\.2'):
        topology.require_compiler(gpus)
    versions['jaxlib'] = '0.1'
    topology.require_compiler(gpus)
    for name in topology.GPU_PACKAGES:
        taken = versions.pop(name)
        with pytest.raises(UserError, match=r'pip install -e .\.\[preflight-gpu\].') as error:
            topology.require_compiler(gpus)
        assert '\n' not in str(error.value)
        versions[name] = taken


@pytest.mark.parametrize(
    ('text', 'chips', 'hosts'),
    [('h100:8', 8, 1), ('2xa100-40:8', 16, 2), ('l4:1 x 4', 4, 4), ('b200:4', 4, 1)],
)
def test_gpus_of_hosts(text, chips, hosts):
    parsed = topology.parse_topology(text)
    assert (parsed.chips, parsed.hosts) == (chips, hosts)
    assert topology.parse_topology(parsed.name) == parsed


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ('h100:16', 'write 2xh100:8'),
        ('h100', 'GPU:NUMBER'),
        ('h100:0', 'GPU:NUMBER'),
        ('a100:8', 'a100-40, a100-80'),
    ],
)
def test_other_numbers_of_gpus_are_refused_in_one_line(text, says):
    with pytest.raises(UserError, match=says) as error:
        topology.parse_topology(text)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', topology.GPUS)
def test_a_program_may_take_what_jax_allocates_of_a_gpu(name, monkeypatch):
    gpu = topology.GPUS[name]
    for variable in topology.MEMORY_FRACTIONS:
        monkeypatch.delenv(variable, raising=False)
    assert gpu.usable == 0.75 * gpu.hbm
    for variable in topology.MEMORY_FRACTIONS:
        monkeypatch.setenv(variable, '0.9')
        assert gpu.usable == 0.9 * gpu.hbm
        monkeypatch.delenv(variable)
    assert gpu.peak > 1e14
    assert f'device_memory_size: {gpu.hbm}\n' in gpu.target


@pytest.mark.parametrize('shares', [('0.9', '0.9'), ('nine tenths', ''), ('', '0'), ('nan', '')])
def test_shares_of_the_memory_that_jax_refuses_are_refused(shares, monkeypatch):
    for variable, share in zip(topology.MEMORY_FRACTIONS, shares, strict=True):
        monkeypatch.setenv(variable, share)
    with pytest.raises(UserError, match='XLA_') as error:
        topology.require_compiler(topology.parse_topology('h100:8'))
    assert '\n' not in str(error.value)


def test_the_compiler_does_not_touch_real_tpus(monkeypatch):
    monkeypatch.setenv('TPU_VISIBLE_CHIPS', '0')
    found = topology.environment(topology.parse_topology('v5e:2x2'))
    assert found['JAX_PLATFORMS'] == 'cpu'
    assert 'TPU_VISIBLE_CHIPS' not in found


def test_a_chip_of_tpu7x_is_two_devices():
    """The chip has 2307 TFLOP/s, 192 GiB and 7380 GB/s."""
    slices = topology.parse_topology('2xtpu7x:2x2x2')
    chip = slices.chip
    assert (slices.chips, slices.devices, slices.hosts, slices.unit) == (16, 32, 4, 'core')
    assert (2 * chip.peak, 2 * chip.usable, 2 * chip.bandwidth) == (2307e12, 192 * 2**30, 7380e9)
    assert topology.parse_topology('v6e-8').devices == 8
    assert flops.chips(8, chip.kind) == 4
