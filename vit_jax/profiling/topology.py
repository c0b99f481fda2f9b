"""Slices of Cloud TPUs and hosts of NVIDIA GPUs: chips, names, and devices for compiling ahead.

libtpu supports the topologies of all TPU generations, and compiles for them on any machine. XLA
compiles for GPUs from a description of the card, without a card or its driver. A host of GPUs,
connected by NVLink, is what a slice is for TPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any

from vit_jax import extras
from vit_jax.errors import UserError, nearest
from vit_jax.profiling import flops

INSTALL = f'preflight needs libtpu, the compiler: {extras.install("preflight")}'
INSTALL_GPU = (
    "preflight for GPUs needs XLA's CUDA plugin and NVIDIA's compiler (250 MB): "
    + extras.install('preflight-gpu')
)
PJRT = 'jax-cuda13-pjrt'
GPU_PACKAGES = (PJRT, 'nvidia-nvvm', 'nvidia-cuda-nvcc')
# Share of the card's memory that JAX allocates, unless a variable sets it. The second variable is
# the older one.
PREALLOCATED = 0.75
MEMORY_FRACTIONS = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a generation; TPUs from cloud.google.com/tpu/docs/system-architecture.

    Attributes:
      generation: Generation in topology names, such as `v5e`.
      kind: JAX's name of the device.
      bandwidth: Memory bandwidth, bytes per second.
      hbm: Bytes of memory.
      link: Bytes per second between it and its neighbors, all links together; of GPUs, sent over
        NVLink or else PCIe.
      clock: Cycles per second at which its matrix units reach the peak.
      dims: Number of dimensions of a slice.
      counted: Whether a slice's name counts chips (1) or their cores (2).
      single_host: Chips of the largest slice with a single machine.
      options: Options of libtpu that make a chip one JAX device.
      networks: Network speeds of a host in clouds, Gb/s.
      devices: JAX devices of a chip, which share it equally; bandwidth, memory, links and peak are
        a device's.
    """

    generation: str
    kind: str
    bandwidth: float
    hbm: int
    link: float
    clock: float
    dims: int = 1
    counted: int = 1
    single_host: int = 8
    options: tuple[tuple[str, str], ...] = ()
    networks: tuple[int, ...] = (25, 50, 100)
    devices: int = 1

    @property
    def peak(self) -> float:
        """FLOP/s in bfloat16."""
        peak = flops.peak_flops(self.kind)
        assert peak
        return peak

    @property
    def usable(self) -> float:
        """Bytes of memory for a program."""
        return self.hbm


@dataclasses.dataclass(frozen=True)
class Gpu(Chip):
    """An NVIDIA GPU, from NVIDIA's data sheets and XLA's `backends/gpu/target_config/specs`.

    An L4 has no NVLink, but 16 lanes of PCIe 4.

    Attributes:
      capability: CUDA's compute capability.
      cores: Streaming multiprocessors.
      fpus: Float32 units per multiprocessor.
      threads: Most threads per multiprocessor.
      shared: Bytes of shared memory.
      l2: Bytes of the L2 cache.
    """

    networks: tuple[int, ...] = (800, 1600, 3200)
    capability: tuple[int, int] = (9, 0)
    cores: int = 132
    fpus: int = 128
    threads: int = 2048
    shared: int = 228 * 1024
    l2: int = 50 * 2**20

    @property
    def usable(self) -> float:
        """Bytes of memory that JAX allocates at its start."""
        return memory_fraction() * self.hbm

    @property
    def target(self) -> str:
        """Return the description for XLA, a GpuTargetConfigProto as text."""
        return TARGET.format(gpu=self, optin=self.shared - 1024, clock=self.clock / 1e9)


TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {clock}
  device_memory_size: {gpu.hbm}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.kind}"
"""
GIB = 2**30
CHIPS_PER_HOST = 4  # of every slice of several machines
_MEGACORE = (('chip_config_name', 'megacore'),)
CHIPS = {
    'v4': Chip('v4', 'TPU v4', 1228e9, 32 * GIB, 300e9, 1.05e9, 3, 2, 4, _MEGACORE),
    'v5e': Chip('v5e', 'TPU v5e', 819e9, 16 * GIB, 200e9, 1.5e9, 2),
    'v5p': Chip('v5p', 'TPU v5p', 2765e9, 95 * GIB, 600e9, 1.75e9, 3, 2, 4),
    'v6e': Chip('v6e', 'TPU v6e', 1640e9, 32 * GIB, 448e9, 1.75e9, 2),
    # Half of the chip's 7380 GB/s, 192 GiB and 600 GB/s. The clock is not published: it follows
    # from the peak of four matrix units of 256 x 256, as v6e has.
    'tpu7x': Chip('tpu7x', 'TPU7x', 3690e9, 96 * GIB, 300e9, 2.2e9, 3, 2, 4, devices=2),
}
_GPUS = (
    Gpu('h100', 'NVIDIA H100 80GB HBM3', 3352e9, 84929347584, 450e9, 1.98e9),
    Gpu('h200', 'NVIDIA H200', 4800e9, 151397597184, 450e9, 1.98e9),
    Gpu(
        *('b200', 'NVIDIA B200', 7672e9, 191514411008, 900e9, 1.965e9),
        capability=(10, 0),
        cores=148,
        l2=132_644_864,
    ),
    _A100 := Gpu(
        *('a100-80', 'NVIDIA A100-SXM4-80GB', 2039e9, 85100068864, 300e9, 1.41e9),
        networks=(100, 400, 1600),
        capability=(8, 0),
        cores=108,
        fpus=64,
        shared=164 * 1024,
        l2=40 * 2**20,
    ),
    dataclasses.replace(
        _A100,
        generation='a100-40',
        kind='NVIDIA A100-SXM4-40GB',
        bandwidth=1555e9,
        hbm=42331013120,
    ),
    Gpu(
        *('l4', 'NVIDIA L4', 300e9, 23580639232, 32e9, 2.04e9),
        networks=(25, 50, 100),
        capability=(8, 9),
        cores=58,
        threads=1536,
        shared=100 * 1024,
        l2=48 * 2**20,
    ),
)
GPUS = {gpu.generation: gpu for gpu in _GPUS}
SEVERAL = re.compile(r'(\d+) *x *(.+)|(.+) +x *(\d+)')
GPU_NAME = re.compile(rf'({"|".join(GPUS)}):([1-9]\d*)')
ALIASES = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'v6litepod': 'v6e', 'v7x': 'tpu7x'}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice, or several of one shape connected by the data-center network.

    Attributes:
      chip: Chip of its generation.
      shape: Chips of a slice along each dimension, or GPUs of a host.
      slices: Number of slices, or of GPU hosts.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """Name that `parse_topology` reads: `v5e:4x4`, or `2xv5e:4x4` for two slices."""
        return self.slice_name if self.slices == 1 else f'{self.slices}x{self.slice_name}'

    @property
    def slice_name(self) -> str:
        """Name of one slice for libtpu, `v5e:4x4`."""
        return f'{self.chip.generation}:{"x".join(map(str, self.shape))}'

    @property
    def part(self) -> str:
        """Word for one of the `slices`."""
        return 'host' if isinstance(self.chip, Gpu) else 'slice'

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * self.slice_chips

    @property
    def slice_chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.slices * self.slice_devices

    @property
    def slice_devices(self) -> int:
        """JAX devices of one slice."""
        return self.slice_chips * self.chip.devices

    @property
    def unit(self) -> str:
        """Word for a JAX device."""
        return 'chip' if self.chip.devices == 1 else 'core'

    @property
    def hosts(self) -> int:
        """Machines (TPU VMs) of all slices."""
        return self.slices * self.slice_hosts

    @property
    def slice_hosts(self) -> int:
        """Machines (TPU VMs) of one slice."""
        is_single_host = self.slice_chips <= self.chip.single_host
        return 1 if is_single_host else -(-self.slice_chips // CHIPS_PER_HOST)


def parse_topology(text: str) -> Topology:
    """Parse the name of a slice: `v5e:4x4`, or an accelerator type, `v5litepod-16`, `tpu-v4-32`.

    The number after the hyphen counts cores on v4, v5p and TPU7x, two per chip, and chips on the
    others. Several slices are `2xv5e:4x4` or `v5litepod-16 x 2`. GPUs of a host are `h100:8`, and
    several hosts `2xh100:8`.

    Raises:
      UserError: for any other text.
    """
    if several := SEVERAL.fullmatch(text):
        count, single = int(several[1] or several[4]), parse_topology(several[2] or several[3])
        if not count or single.slices > 1:
            raise UserError(f'--topology {text!r}: write NUMBERxSLICE, such as 2xv5e:4x4')
        return dataclasses.replace(single, slices=count)
    if text.partition(':')[0] in GPUS:
        return _host(text)
    match = re.fullmatch(r'(?:tpu-)?([a-z0-9]+)(?::([\dx]+)|-([1-9]\d*))', text)
    if match is None:
        raise UserError(
            f'--topology {text!r}: write GENERATION:SHAPE or -SIZE, such as v5e:4x4, v4-32, h100:8'
        )
    name = ALIASES.get(match[1], match[1])
    if name not in CHIPS:
        raise UserError('--topology: ' + nearest('TPU or GPU', name, [*CHIPS, *GPUS]))
    chip = CHIPS[name]
    if match[3]:
        return Topology(chip, _shape(text, chip, int(match[3])))
    shape = tuple(int(n or 0) for n in match[2].split('x'))
    if len(shape) != chip.dims or not all(shape):
        example = 'x'.join('442'[: chip.dims])
        raise UserError(
            f'--topology {text!r}: {name} has {chip.dims} dimensions, such as {example}'
        )
    if math.prod(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        raise UserError(
            f'--topology {text!r}: a slice of {name} consists of machines of 2 x 2 chips: make the '
            'first two sides even'
        )
    return Topology(chip, shape)


def _host(text: str) -> Topology:
    """Parse the GPUs of a host, `h100:8`."""
    match = GPU_NAME.fullmatch(text)
    if match is None:
        raise UserError(
            f'--topology {text!r}: write GPU:NUMBER, such as h100:8, or 2xh100:8 for two hosts'
        )
    gpu, number = GPUS[match[1]], int(match[2])
    if number > gpu.single_host:
        hosts = -(-number // gpu.single_host)
        raise UserError(
            f'--topology {text!r}: a host has at most {gpu.single_host} GPUs; write '
            f'{hosts}x{gpu.generation}:{-(-number // hosts)} for {hosts} hosts'
        )
    return Topology(gpu, (number,))


def _shape(text: str, chip: Chip, size: int) -> tuple[int, ...]:
    """Find the most cubic shape of `size`, shorter sides first; a full machine is 2 x 2."""
    if not (sides := _shapes(chip, size)):
        unit = 'cores, two per chip' if chip.counted == 2 else 'chips'
        nearest_names = ' and '.join(f'{chip.generation}-{n}' for n in _nearest_sizes(chip, size))
        raise UserError(
            f'--topology {text!r}: no slice of {chip.generation} has {size} {unit}; the nearest: '
            f'{nearest_names}'
        )
    chips = size // chip.counted
    best = min(sides, key=lambda s: (max(s) / min(s), s))
    return best if chip.dims == 2 or chips > 4 else tuple(sorted(best, reverse=True))


def _shapes(chip: Chip, size: int) -> list[tuple[int, ...]]:
    """List every shape of a slice of `size`, shorter sides first."""
    chips, remainder = divmod(size, chip.counted)
    if remainder or not chips:
        return []
    sides = _sides(chips, chip.dims)
    if chips == 1:
        return sides
    return [s for s in sides if s[0] % 2 == 0 or (chip.dims == 3 and s[1] % 2 == 0)]


def _nearest_sizes(chip: Chip, size: int) -> list[int]:
    """Find the next smaller and larger slice sizes whose chips are a power of two."""
    sizes = [chip.counted * 2**n for n in range(size.bit_length() + 2)]
    valid = [n for n in sizes if _shapes(chip, n)]
    return [*[n for n in valid if n < size][-1:], *[n for n in valid if n > size][:1]]


def _sides(count: int, dims: int) -> list[tuple[int, ...]]:
    if dims == 1:
        return [(count,)]
    firsts = [n for n in range(1, count + 1) if count % n == 0]
    shapes = [(n, *other_sides) for n in firsts for other_sides in _sides(count // n, dims - 1)]
    return [s for s in shapes if list(s) == sorted(s)]


def memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX allocates, by its environment variables.

    Raises:
      UserError: for two variables, which JAX refuses too, or anything but a positive number.
    """
    variables = [name for name in MEMORY_FRACTIONS if os.environ.get(name)]
    if not variables:
        return PREALLOCATED
    if len(variables) > 1:
        raise UserError(
            f'{variables[0]} and {variables[1]} are both set: unset the second, the older name'
        )
    text = os.environ[variables[0]]
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise UserError(f'{variables[0]}={text}: must be a positive number, such as 0.92')
    return share


def require_compiler(topology: Topology) -> None:
    """Raise UserError if the compiler is missing or does not match the version of JAX.

    On GPUs, also raise it for a share of the memory that JAX would refuse.
    """
    if not isinstance(topology.chip, Gpu):
        if importlib.util.find_spec('libtpu') is None:
            raise UserError(INSTALL)
        return
    memory_fraction()
    try:
        versions = [importlib.metadata.version(name) for name in GPU_PACKAGES]
    except importlib.metadata.PackageNotFoundError as e:
        raise UserError(INSTALL_GPU) from e
    if versions[0] != (jaxlib_version := importlib.metadata.version('jaxlib')):
        raise UserError(
            f'{PJRT} {versions[0]} is not for jaxlib {jaxlib_version}: '
            f'pip install {PJRT}=={jaxlib_version}'
        )


def environment(topology: Topology) -> dict[str, str]:
    """Return environment variables for a process that compiles without a device."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(('TPU_', 'LIBTPU_'))}
    variables |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_ENABLE_COMPILATION_CACHE': 'false',
        'TF_CPP_MIN_LOG_LEVEL': '3',
    }
    if isinstance(topology.chip, Gpu):
        return variables
    return variables | {
        'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
        # Without these, libtpu asks a metadata server, and complains if there is none.
        'TPU_SKIP_MDS_QUERY': '1',
        'TPU_ACCELERATOR_TYPE': 'v5litepod-1',
        'TPU_WORKER_HOSTNAMES': 'localhost',
        'TPU_WORKER_ID': '0',
        'TPU_STDERR_LOG_LEVEL': '3',
    }


def devices(topology: Topology) -> list[Any]:
    """Describe the devices of all slices, one per chip, or two on TPU7x.

    Call it in a process with the variables of `environment`.

    Raises:
      UserError: if the compiler does not support the slice.
    """
    import jax
    from jax.experimental import topologies

    name, platform, options = topology.slice_name, 'tpu', dict[str, Any](topology.chip.options)
    if isinstance(topology.chip, Gpu):
        hosts = f'1x{topology.slices}x{topology.slice_chips}'  # slices x hosts x GPUs
        options = {'topology': hosts, 'target_config': topology.chip.target}
        name, platform = '', 'cuda'
    elif topology.slice_chips < 4:  # smaller than the machine that libtpu assumes
        options['chips_per_host_bounds'] = [*topology.shape, 1][:3]
    if platform == 'tpu' and topology.slices > 1:
        options['num_slices'] = topology.slices
    try:
        described = topologies.get_topology_desc(name, platform, **options)
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f'--topology {topology.name}: {str(e).splitlines()[0]}') from e
    return list(described.devices)
