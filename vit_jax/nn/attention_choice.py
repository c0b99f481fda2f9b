"""The choice between XLA's attention, the TPU kernels and cuDNN's on GPUs.

It is made at trace time from the devices that the program is compiled for. If they are here, a
kernel is first compared with XLA's attention on one of them; see `nn.kernels.check`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.nn.attention import AttentionSpec, WindowSpec
from vit_jax.nn.kernels import check

_log = logging.getLogger(__name__)
ATTENTIONS = ('auto', 'xla', 'pallas', 'cudnn')
MIB = 2**20
# VMEM of a core by JAX's names of devices, from `pallas.tpu.get_tpu_info`. Unknown chips count as
# the smallest.
VMEM = {
    'TPU v5 lite': 128 * MIB,
    'TPU v5e': 128 * MIB,
    'TPU v5': 64 * MIB,
    'TPU v5p': 64 * MIB,
    'TPU v6 lite': 128 * MIB,
    'TPU v6e': 128 * MIB,
}
SMALLEST = 16 * MIB
# Queries of a program where whole sequences do not fit; fewer than 128 leave lanes empty.
BLOCKS = (128, 256, 384, 512)
# Fixed cost of a block, in queries: its instructions apart from those of the queries, counted in
# the machine code for v5e.
OVERHEAD = 100
# What cuDNN computes. Hopper takes heads of 256, but JAX asks a GPU that may not be here.
CUDNN_DTYPES, WIDEST_HEAD = ('bfloat16', 'float16'), 128
# An H100 computes attention to 50 tokens and its gradients in 0.31 ms by XLA's, 0.39 ms by cuDNN's;
# to 196 tokens in 3.1 and 1.4 ms (docs/benchmarks.md).
FEWEST_KEYS_OF_CUDNN = 64
# The share of VMEM for the kernel; the compiler keeps other arrays in the rest.
SHARE = 0.75

Rows = Float[Array, 'B ...']


class Devices(NamedTuple):
    """The devices that a program is compiled for.

    Attributes:
      kind: JAX's name of the kind of device.
      shards: number of parts that the program's batch is split into.
      map_rows: makes a function of arrays of rows (or None) run on every device's own rows; None
        for a program on one device.
      whole: whether a device has whole rows, instead of some of the heads.
      measure: computes a number on one of the devices while a program is being traced, and returns
        the largest of all processes; None if the devices are not here.
    """

    kind: str
    shards: int = 1
    map_rows: Callable[[Callable[..., Rows]], Callable[..., Rows]] | None = None
    whole: bool = True
    measure: Callable[[Callable[[], float]], float] | None = None


_devices: ContextVar[Devices | None] = ContextVar('devices', default=None)


@contextlib.contextmanager
def runs_on(devices: Devices) -> Iterator[None]:
    """Declare the devices of the program that is being traced.

    Enter it inside the traced function. Outside of it attention is XLA's, which runs everywhere.
    """
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def kernel_block(attention: str, spec: AttentionSpec) -> int | None:
    """The `block` with which `kernels.attention.fused_attention` computes a layer on a TPU.

    Args:
      attention: of ATTENTIONS.
      spec: of the layer.

    Returns:
      The queries of a program, 0 for all; None if the TPU kernel does not compute the layer.

    Raises:
      UserError: if the kernel is requested by name, but not possible or not to be trusted.
    """
    devices = _devices.get()
    if attention in ('xla', 'cudnn') or devices is None or _is_cudnn(attention, devices):
        return None
    why, failure = _obstacle(devices, spec), ''
    block = 0 if why else _block(devices, spec)
    if block is None:
        why = _vmem_shortage(devices, spec)
    elif not why and devices.measure is not None:
        failure = check.numerical_failure(spec, block, devices.measure)
    return block if decide(attention, 'pallas', why, failure) else None


def takes_cudnn(attention: str, spec: AttentionSpec) -> bool:
    """Whether `kernels.cudnn.fused_attention` computes the attention of a layer on a GPU.

    The arguments and errors are those of `kernel_block`.
    """
    devices = _devices.get()
    if devices is None or not _is_cudnn(attention, devices):
        return False
    if attention == 'auto' and spec.keys < FEWEST_KEYS_OF_CUDNN:
        return False
    why, failure = '', ''
    if not devices.kind.startswith('NVIDIA'):
        why = f'needs an NVIDIA GPU, and this is {devices.kind}'
    why = why or _split_obstacle(devices, spec.shape[0]) or _cudnn_obstacle(spec)
    if attention == 'auto' and not why and spec.bias_rows:
        return False  # cuDNN's gradient of a bias is slow
    if not why and devices.measure is not None:
        failure = check.numerical_failure_of_cudnn(spec, devices.measure)
    return decide(attention, 'cudnn', why, failure)


def _is_cudnn(attention: str, devices: Devices) -> bool:
    on_gpu = attention == 'auto' and devices.kind.startswith('NVIDIA')
    return attention == 'cudnn' or on_gpu


def window_kernel(attention: str, spec: WindowSpec, obstacle: str = '') -> bool:
    """`kernel_block` for attention in windows: whether `window_attention` computes it."""
    devices = _devices.get()
    if attention == 'xla' or devices is None:
        return False
    if attention == 'cudnn':
        return decide(attention, 'cudnn', 'does not compute attention in windows', '')
    why, failure = obstacle or _mismatch(devices, spec.shape[0]), ''
    why = why or check.vmem_shortage(spec, SHARE * _vmem_of(devices))
    if not why and devices.measure is not None:
        failure = check.numerical_failure_in_windows(spec, devices.measure)
    return decide(attention, 'pallas', why, failure)


def may_take_kernel(layer: nn.Module) -> bool:
    """Whether a layer with a field `attention` may use a kernel in the call that is traced.

    XLA's attention creates the parameters, and alone computes weights that can be kept.
    """
    if layer.attention == 'xla' or layer.is_initializing():
        return False
    return not layer.is_mutable_collection('intermediates')


def decide(attention: str, kernel: str, obstacle: str, failure: str) -> bool:
    """Whether a layer takes a kernel. If it could be expected to, the log says why it does not.

    Args:
      attention: of ATTENTIONS.
      kernel: `pallas` or `cudnn`.
      obstacle: a requirement that the kernel does not support; empty without one.
      failure: of the numerical check; empty if it passed.

    Raises:
      UserError: if there is either, and the kernel is requested by name.
    """
    why = obstacle or failure
    if why and attention == kernel:
        raise UserError(f"attention='{kernel}' {why}; choose '{'xla' if failure else 'auto'}'")
    if failure or (obstacle and kernel == 'cudnn'):
        _warn_once(f'the attention kernel {why}; the attention of XLA takes its place')
    return not why


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning('%s', text)


def on_every_device(function: Callable[..., Rows]) -> Callable[..., Rows]:
    """Apply a function of arrays of rows to the rows of each device."""
    devices = _devices.get()
    return devices.map_rows(function) if devices and devices.map_rows else function


def for_every_device(x: Array) -> Rows:
    """An array that is the same for all rows, with a first axis that is split over the devices."""
    devices = _devices.get()
    return jnp.broadcast_to(x, (devices.shards if devices else 1, *x.shape))


def attend_in_windows(
    qkv: Float[Array, 'B W N E'],
    bias: Float[Array, 'H N N'],
    regions: Int[Array, 'W N'] | None = None,
) -> Float[Array, 'B W N D']:
    """`kernels.windows.window_attention` of the rows of each device."""
    from vit_jax.nn.kernels.windows import window_attention

    def attend(qkv: Array, bias: Array) -> Array:
        return window_attention(qkv, bias[0], regions)

    return on_every_device(attend)(qkv, for_every_device(bias))


def _mismatch(devices: Devices, rows: int) -> str:
    """The reason why these devices cannot run a TPU kernel on so many rows; empty if they can."""
    if not devices.kind.startswith('TPU'):
        return f'needs a TPU, and this is {devices.kind}'
    return _split_obstacle(devices, rows)


def _split_obstacle(devices: Devices, rows: int) -> str:
    """The reason why no kernel can run on the devices' own rows; empty if it can."""
    if not devices.whole:
        return 'cannot split heads over devices, as config.parallel.tensor does'
    if rows % devices.shards:
        return f'needs a multiple of {devices.shards} examples, not {rows}'
    return ''


def _obstacle(devices: Devices, spec: AttentionSpec) -> str:
    """The reason why these devices cannot run the TPU kernel on a layer; empty if they can."""
    shape, keys = spec.shape, spec.keys
    if spec.bias_rows:
        return 'does not support biases of scores'
    if spec.mask_queries:
        return 'supports only masks of keys, [B 1 1 M]'
    if mismatch := _mismatch(devices, shape[0]):
        return mismatch
    if len(shape) != 3:
        return f'needs [B N D], not {list(shape)}'
    if min(shape[1], keys) < 2:
        return f'needs two queries and keys at least, not {shape[1]} and {keys}'
    return ''


def _cudnn_obstacle(spec: AttentionSpec) -> str:
    """The reason why cuDNN cannot compute the attention of a layer; empty if it can."""
    size = spec.shape[-1] // spec.num_heads
    if len(spec.shape) != 3:
        return f'needs [B N D], not {list(spec.shape)}'
    if spec.dtype not in CUDNN_DTYPES:
        return f'needs {" or ".join(CUDNN_DTYPES)}, not {spec.dtype}'
    if size % 8 or size > WIDEST_HEAD:
        return f'needs heads of a multiple of 8 up to {WIDEST_HEAD}, not {size}'
    if spec.rate:
        return 'does not support dropout of weights'
    if spec.bias_rows > 1:
        return f'needs a bias that all examples share, not one for each of {spec.bias_rows}'
    if spec.bias_rows and (spec.masked or spec.segmented):
        return 'does not support a bias together with a mask'  # its gradient would have their rows
    if min(spec.shape[1], spec.keys) < 2:
        return f'needs two queries and keys at least, not {spec.shape[1]} and {spec.keys}'
    return ''


def _block(devices: Devices, spec: AttentionSpec) -> int | None:
    """Queries of a program, 0 for all; None if nothing fits.

    Blocks take at most half of VMEM if any are so small.
    """
    there, queries = _vmem_of(devices), spec.shape[1]
    for share, blocks in ((SHARE, (0,)), (0.5, BLOCKS), (SHARE, BLOCKS)):
        if fitting := [b for b in blocks if _vmem(spec, b) <= share * there]:
            return min(fitting, key=lambda b: math.ceil(queries / max(b, 1)) * (b + OVERHEAD))
    return None


def _vmem(spec: AttentionSpec, block: int) -> int:
    """Bytes of VMEM that the kernel needs."""
    from vit_jax.nn.kernels import attention, blocks

    (_, queries, width), itemsize = spec.shape, jnp.dtype(spec.dtype).itemsize
    needed = blocks.vmem_bytes if block else attention.vmem_bytes
    sizes = (spec.keys, width, spec.num_heads, itemsize, spec.rate > 0)
    return needed(min(block, queries) or queries, *sizes)


def _vmem_of(devices: Devices) -> int:
    return VMEM.get(devices.kind, SMALLEST)


def _vmem_shortage(devices: Devices, spec: AttentionSpec) -> str:
    """The reason why not even the smallest block fits."""
    (_, queries, width), keys = spec.shape, spec.keys
    tokens = f'{queries}' if queries == keys else f'{queries} and {keys}'
    sizes = f'{_vmem(spec, BLOCKS[0]) / MIB:.0f} of {_vmem_of(devices) / MIB:.0f} MiB'
    return f'keeps keys and values in VMEM: {tokens} tokens of width {width} need {sizes}'
