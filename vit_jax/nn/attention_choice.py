"""Choice between XLA's attention, the TPU kernels and cuDNN's on GPUs.

`choose` is a function of the device, the sizes and masks of the layer, and the numerical check that
a kernel passes before its first use; see `nn.kernels.check`. The device comes from JAX's ambient
mesh (`jax.set_mesh`), or is the default device without one; JAX's caches have both in their keys.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.nn.attention import AttentionSpec, WindowSpec
from vit_jax.nn.device import Target, automatic_axes, current_target
from vit_jax.nn.kernels.interface import (
    Cudnn,
    Inputs,
    Kernel,
    Pallas,
    PallasWindows,
    attend_plainly,
)

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
    'TPU7x': 64 * MIB,
}
SMALLEST = 16 * MIB
# Queries of a program where whole sequences do not fit; fewer than 128 leave lanes empty.
BLOCKS = (128, 256, 384, 512)
# Fixed cost of a block, in queries: the instructions that do not depend on the number of queries,
# counted in the machine code for v5e.
OVERHEAD = 100
# What cuDNN computes. Hopper takes heads of 256, but JAX asks a GPU that may not be here.
CUDNN_DTYPES, WIDEST_HEAD = ('bfloat16', 'float16'), 128
# An H100 computes attention to 50 tokens and its gradients in 0.31 ms by XLA's, 0.39 ms by cuDNN's;
# to 196 tokens in 3.1 and 1.4 ms (docs/benchmarks.md).
FEWEST_KEYS_OF_CUDNN = 64
# The share of VMEM for the kernel; the compiler keeps other arrays in the rest.
SHARE = 0.75

Spec = AttentionSpec | WindowSpec


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel for a layer on its devices."""

    kernel: Kernel
    spec: Any
    target: Target

    @property
    def packed(self) -> bool:
        """Whether the kernel reads several projections of one input as one array."""
        return self.kernel.packed

    def attend(self, inputs: Inputs) -> Float[Array, 'B *N D']:
        """Compute the attention of each device's rows."""
        rows = self._spread(inputs)

        def apply(rows: Inputs) -> Array:
            local = rows._replace(regions=inputs.regions)
            local = local if rows.bias is None else local._replace(bias=rows.bias[0])
            return self._attend_here(local)

        if self.target.rows and self.target.devices > 1:
            split = P(self.target.rows)
            apply = jax.shard_map(
                apply,
                in_specs=split,
                out_specs=split,
                axis_names={*automatic_axes(jax.sharding.get_abstract_mesh())},
                check_vma=False,
            )
        return apply(rows)

    def _spread(self, x: Inputs) -> Inputs:
        """Add a first axis to the bias, which is split over the devices like rows."""
        bias = x.bias
        if bias is not None:
            bias = jnp.broadcast_to(bias, (self.target.shards, *bias.shape))
        mask = x.mask
        if mask is not None:
            mask = jnp.broadcast_to(mask, (self.spec.shape[0], *mask.shape[1:-1], self.spec.keys))
        return x._replace(bias=bias, mask=mask, regions=None)

    def _attend_here(self, inputs: Inputs) -> Array:
        by_kernel = functools.partial(self.kernel.attend, self.spec)
        if not self.target.assumed:
            return by_kernel(inputs)
        plainly = functools.partial(attend_plainly, self.spec)
        platform = 'cuda' if isinstance(self.kernel, Cudnn) else 'tpu'
        return jax.lax.platform_dependent(inputs, default=plainly, **{platform: by_kernel})


def choose_for(layer: nn.Module, spec: Spec) -> Choice | None:
    """Choose the kernel of a layer with a field `attention` in the traced call; None for XLA.

    Only XLA's attention creates parameters, and computes weights that can be kept.
    """
    if layer.attention == 'xla' or layer.is_initializing():
        return None
    if layer.is_mutable_collection('intermediates'):
        return None
    target = current_target()
    kernel = choose(layer.attention, spec, target)
    return None if kernel is None else Choice(kernel, spec, target)


def choose(attention: str, spec: Spec, target: Target) -> Kernel | None:
    """Choose the kernel that computes the attention of a layer; None for XLA's.

    Args:
      attention: One of ATTENTIONS.
      spec: Sizes of the layer.
      target: Devices of the program.

    Raises:
      UserError: if a kernel is requested by name, but is not possible or fails its check.
    """
    if attention == 'xla' or (attention == 'auto' and target.kind == 'cpu'):
        return None
    kernel: Kernel | None
    if attention == 'cudnn' or (attention == 'auto' and target.kind.startswith('NVIDIA')):
        kernel, name, reason = Cudnn(), 'cudnn', _cudnn_obstacle(spec, target)
        if attention == 'auto' and _is_slow_by_cudnn(spec, reason):
            return None
    else:
        kernel, reason = _pallas_kernel(spec, target)
        name = 'pallas'
    failure = ''
    if kernel is not None and not reason:
        from vit_jax.nn.kernels import check

        failure = check.failure(kernel, spec, target.kind, target.devices)
    return kernel if decide(attention, name, reason, failure) else None


def decide(attention: str, kernel: str, obstacle: str, failure: str) -> bool:
    """Decide whether a layer uses a kernel; log why not where users would expect it.

    Args:
      attention: One of ATTENTIONS.
      kernel: `pallas` or `cudnn`.
      obstacle: A requirement that the kernel does not support; empty without one.
      failure: Failure of the numerical check; empty if it passed.

    Raises:
      UserError: if there is either, and the kernel is requested by name.
    """
    reason = obstacle or failure
    if reason and attention == kernel:
        raise UserError(f"attention='{kernel}' {reason}; choose '{'xla' if failure else 'auto'}'")
    if failure or (obstacle and kernel == 'cudnn') or SET_MESH in obstacle:
        _warn_once(f'the attention kernel {reason}; the attention of XLA takes its place')
    return not reason


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning('%s', text)


def _is_slow_by_cudnn(spec: Spec, obstacle: str) -> bool:
    """Return whether XLA is faster than cuDNN, and the log need not name an obstacle."""
    if isinstance(spec, WindowSpec) or spec.keys < FEWEST_KEYS_OF_CUDNN:
        return True
    return spec.bias_rows > 0 and not obstacle  # its gradient of a bias is slow


def _cudnn_obstacle(spec: Spec, target: Target) -> str:
    """Return the reason why these devices cannot compute a layer by cuDNN; empty if they can."""
    if isinstance(spec, WindowSpec):
        return 'does not compute attention in windows'
    if not target.kind.startswith('NVIDIA'):
        return f'needs an NVIDIA GPU, and this is {target.kind}'
    if split := _split_obstacle(target, spec.shape[0]):
        return split
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
    return _too_few_tokens(spec)


def _pallas_kernel(spec: Spec, target: Target) -> tuple[Kernel | None, str]:
    """Return the TPU kernel for a layer, and the reason why these devices cannot run it, if any."""
    if isinstance(spec, WindowSpec):
        why = 'does not support dropout of weights in windows' if spec.rate else ''
        why = why or _tpu_obstacle(target, spec.shape[0])
        return PallasWindows(), why or _window_vmem_shortage(spec, SHARE * _vmem_of(target))
    if spec.bias_rows:
        return None, 'does not support biases of scores'
    if spec.mask_queries:
        return None, 'supports only masks of keys, [B 1 1 M]'
    if obstacle := _tpu_obstacle(target, spec.shape[0]):
        return None, obstacle
    if len(spec.shape) != 3:
        return None, f'needs [B N D], not {list(spec.shape)}'
    if few := _too_few_tokens(spec):
        return None, few
    block = _block(target, spec)
    return (None, _vmem_shortage(target, spec)) if block is None else (Pallas(block), '')


def _tpu_obstacle(target: Target, rows: int) -> str:
    """Return why these devices cannot run a TPU kernel on so many rows; empty if they can."""
    if not target.kind.startswith('TPU'):
        return f'needs a TPU, and this is {target.kind}'
    if target.assumed and target.devices > 1:
        # JAX splits cuDNN's kernels, but not TPU kernels.
        return f'needs a mesh, as one of {target.devices} devices or all may be meant: {SET_MESH}'
    return _split_obstacle(target, rows)


SET_MESH = 'call the program in `with jax.set_mesh(mesh):`'


def _split_obstacle(target: Target, rows: int) -> str:
    """Return the reason why no kernel can run on each device's rows; empty if it can."""
    if not target.whole:
        return 'cannot split heads over devices, as config.parallel.tensor does'
    if rows % target.shards:
        return f'needs a multiple of {target.shards} examples, not {rows}'
    return ''


def _too_few_tokens(spec: AttentionSpec) -> str:
    if min(spec.shape[1], spec.keys) < 2:
        return f'needs two queries and keys at least, not {spec.shape[1]} and {spec.keys}'
    return ''


def _block(target: Target, spec: AttentionSpec) -> int | None:
    """Choose the queries of a program, 0 for all; None if nothing fits.

    Blocks take at most half of VMEM if any are so small.
    """
    vmem, queries = _vmem_of(target), spec.shape[1]
    for share, blocks in ((SHARE, (0,)), (0.5, BLOCKS), (SHARE, BLOCKS)):
        if fitting := [b for b in blocks if _vmem(spec, b) <= share * vmem]:
            return min(fitting, key=lambda b: math.ceil(queries / max(b, 1)) * (b + OVERHEAD))
    return None


def _vmem(spec: AttentionSpec, block: int) -> int:
    """Compute the bytes of VMEM that the kernel needs."""
    from vit_jax.nn.kernels import attention, blocks

    (_, queries, width), itemsize = spec.shape, jnp.dtype(spec.dtype).itemsize
    needed = blocks.vmem_bytes if block else attention.vmem_bytes
    sizes = (spec.keys, width, spec.num_heads, itemsize, spec.rate > 0)
    return needed(min(block, queries) or queries, *sizes)


def _vmem_of(target: Target) -> int:
    return VMEM.get(target.kind, SMALLEST)


def _vmem_shortage(target: Target, spec: AttentionSpec) -> str:
    """Return the reason why not even the smallest block fits."""
    (_, queries, width), keys = spec.shape, spec.keys
    tokens = f'{queries}' if queries == keys else f'{queries} and {keys}'
    sizes = f'{_vmem(spec, BLOCKS[0]) / MIB:.0f} of {_vmem_of(target) / MIB:.0f} MiB'
    return f'keeps keys and values in VMEM: {tokens} tokens of width {width} need {sizes}'


def _window_vmem_shortage(spec: WindowSpec, limit: float) -> str:
    """Return the reason why the kernel of windows does not fit `limit` bytes; empty if it does."""
    from vit_jax.nn.kernels.windows import vmem_bytes, windows_per_program

    _, windows, tokens, width = spec.shape
    itemsize = jnp.dtype(spec.dtype).itemsize
    program = windows_per_program(windows, tokens, width, itemsize)
    needed = vmem_bytes(program, tokens, width, spec.num_heads, itemsize)
    if needed <= limit:
        return ''
    sizes = f'{needed / MIB:.0f} of {limit / MIB:.0f} MiB'
    return f'keeps windows in VMEM: {tokens} tokens of width {width} need {sizes}'
