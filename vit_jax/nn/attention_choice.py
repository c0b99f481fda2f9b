"""The choice between XLA's attention and the TPU kernel.

It is made at trace time from the devices that the program is compiled for. If they are here, the
kernel is first compared with XLA's attention on one of them; see `attention_check`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.nn import attention_check
from vit_jax.nn.attention import Call

_log = logging.getLogger(__name__)
ATTENTIONS = ('auto', 'xla', 'pallas')
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


def takes_kernel(attention: str, call: Call, obstacle: str = '') -> bool:
    """Whether `fused_attention` computes the attention of a layer.

    Args:
      attention: of ATTENTIONS.
      call: of the layer.
      obstacle: a requirement of the layer that the kernel does not support; empty if there is none.

    Raises:
      UserError: if the kernel is requested by name, but not possible or not to be trusted.
    """
    devices = _devices.get()
    if attention == 'xla' or devices is None:
        return False
    why, doubt = obstacle or _obstacle(devices, call), ''
    if not why and devices.measure is not None:
        why = doubt = attention_check.doubt(call, devices.measure)
    if why and attention == 'pallas':
        raise UserError(f"attention='pallas' {why}; choose '{'xla' if doubt else 'auto'}'")
    if doubt:
        _warn_once(f'the attention kernel {doubt}; the attention of XLA takes its place')
    return not why


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning('%s', text)


def on_every_device(function: Callable[..., Rows]) -> Callable[..., Rows]:
    """Apply a function of arrays of rows to the rows of each device."""
    devices = _devices.get()
    return devices.map_rows(function) if devices and devices.map_rows else function


def _obstacle(devices: Devices, call: Call) -> str:
    """The reason why these devices cannot run the kernel on these tokens; empty if they can."""
    shape, keys = call.shape, call.keys
    if not devices.kind.startswith('TPU'):
        return f'needs a TPU, and this is {devices.kind}'
    if not devices.whole:
        return 'splits no heads over devices, as config.parallel.tensor does'
    if len(shape) != 3 or shape[0] % devices.shards:
        return f'needs [B N D] with B a multiple of {devices.shards}, not {list(shape)}'
    from vit_jax.nn.attention_kernel import vmem_bytes

    _, queries, width = shape
    if min(queries, keys) < 2:
        return f'needs two queries and keys at least, not {queries} and {keys}'
    itemsize = jnp.dtype(call.dtype).itemsize
    needed = vmem_bytes(queries, keys, width, call.num_heads, itemsize, call.rate > 0)
    there = VMEM.get(devices.kind, SMALLEST)
    if needed > SHARE * there:
        tokens = f'{queries}' if queries == keys else f'{queries} and {keys}'
        sizes = f'{needed / MIB:.0f} of {there / MIB:.0f} MiB'
        return f'keeps whole sequences in VMEM: {tokens} tokens of width {width} need {sizes}'
    return ''
