"""Exact FLOPs of any function from its jaxpr, peak rates of devices, and MFU.

A FLOP is one multiplication or one addition: a multiply-accumulate (MAC) is two.
Matmuls and convolutions are counted, the usual convention of "model FLOPs"
(Kaplan et al. 2020, appendix; Chowdhery et al. 2022, appendix B); softmax,
normalizations and element-wise work are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

TRAIN_TO_FORWARD = 3
"""A training step costs the forward pass, and twice that for the two gradients of a matmul."""


def count_flops(fn: Callable, *abstract_args: Any) -> int:
    """Count the FLOPs of a call of `fn` from its jaxpr, without running or compiling it.

    Loop bodies count once per iteration, mapped code once per device, recomputation under
    `jax.checkpoint` again, and a conditional as its most expensive branch.

    Args:
      fn: Function of arrays that JAX can trace.
      *abstract_args: Pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: for matmuls inside a `while_loop`, whose trip count is unknown.
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*abstract_args))


def forward_flops(model: Any, *inputs: Any, rngs: tuple[str, ...] = ()) -> int:
    """Count the FLOPs of a Flax model's evaluation on (abstract) inputs of shape [B, ...].

    Args:
      model: Linen module.
      *inputs: Inputs of its call.
      rngs: Names of its random streams in evaluation, see `Task.rngs`.
    """
    return variables_and_flops(model, *inputs, rngs=rngs)[1]


def variables_and_flops(
    model: Any, *inputs: Any, rngs: tuple[str, ...] = ()
) -> tuple[dict[str, Any], int]:
    """Return the shapes of a model's variables, and `forward_flops`, by tracing it once.

    Drawing parameters multiplies no matrices, so it does not count.
    """
    keys = dict.fromkeys(('params', *rngs), jax.random.key(0))

    def forward(*args: Any) -> Any:
        return model.init_with_output(keys, *args, train=False)

    jaxpr, (_, variables) = jax.make_jaxpr(forward, return_shape=True)(*inputs)
    return variables, jaxpr_flops(jaxpr)


def jaxpr_flops(jaxpr: Any) -> int:
    """Count the FLOPs of a traced function; see `count_flops`."""
    return sum(_equation_flops(eqn) for eqn in jaxpr.eqns)


def _equation_flops(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in _LEAVES:
        return _LEAVES[name](eqn)
    inner = [jaxpr_flops(jaxpr) for jaxpr in _sub_jaxprs(eqn.params)]
    if name == 'cond':
        return max(inner)
    if name == 'while' and sum(inner):
        raise ValueError(
            'FLOPs of a while_loop with matmuls cannot be counted: its trip count is unknown; '
            'use lax.scan, or lax.fori_loop with Python bounds'
        )
    return _repeats(name, eqn.params) * sum(inner)


def _sub_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, 'eqns'):
                yield item


def _repeats(name: str, params: dict[str, Any]) -> int:
    if name == 'scan':
        return params['length']
    if name == 'shard_map':  # its jaxpr is one device's share; pmap uses it, too
        return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
    if name == 'pallas_call':
        return math.prod(params['grid_mapping'].grid)
    return 1


def _dot_flops(eqn: Any) -> int:
    (contracted, _), _ = eqn.params['dimension_numbers']
    lhs = eqn.invars[0].aval
    terms = math.prod(lhs.shape[axis] for axis in contracted)
    return 2 * eqn.outvars[0].aval.size * terms


def _conv_flops(eqn: Any) -> int:
    """Count padding as data, but not the zeros that a transposed convolution inserts."""
    numbers = eqn.params['dimension_numbers']
    kernel = eqn.invars[1].aval.shape
    _, in_channels, *window = (kernel[axis] for axis in numbers.rhs_spec)
    terms = in_channels * math.prod(window)
    return 2 * eqn.outvars[0].aval.size * terms // math.prod(eqn.params['lhs_dilation'])


_LEAVES: dict[str, Callable[[Any], int]] = {
    'dot_general': _dot_flops,
    'conv_general_dilated': _conv_flops,
}

# Dense (no sparsity) bf16 rates with float32 accumulation, of one JAX device: half a chip on TPU
# v2, v3 and TPU7x, a chip on v4 to v6e. V100 and T4 have no bf16 units: rates of float16.
# Sources: cloud.google.com/tpu/docs/system-architecture and the vendors' data sheets; half of the
# sparse rates of HGX B300, GB200 NVL72 and GB300 NVL72; NVIDIA's whitepapers of Ada (RTX 4090) and
# RTX Blackwell (RTX 5090, RTX PRO 6000); AMD's data sheet of Instinct MI300X.
PEAK_FLOPS: dict[str, float] = {
    'A10': 125e12,
    'A30': 165e12,
    'A100': 312e12,
    'L4': 121e12,
    'L40S': 362e12,
    'H100': 989e12,
    'H100 NVL': 835e12,
    'H100 PCIe': 756e12,
    'H200': 989e12,
    'GH200': 989e12,
    'B200': 2250e12,
    'GB200': 2500e12,
    'B300': 2250e12,
    'GB300': 2500e12,
    'V100': 125e12,
    'V100-PCIE': 112e12,
    'V100S': 130e12,
    'T4': 65e12,
    'RTX 4090': 165.2e12,
    'RTX 5090': 209.5e12,
    'RTX PRO 6000': 503.8e12,
    'RTX PRO 6000 Blackwell Max-Q': 438.9e12,
    'MI300X': 1307.4e12,
    'TPU v2': 23e12,
    'TPU v3': 61.5e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'TPU7x': 1153.5e12,
}

# A JAX device is one of the two cores of these chips.
_UNKNOWN = re.compile(r'MIG|Laptop|\bRTX \d+ D\b|^TPU v4 lite$')  # smaller than their names
_HALF_CHIPS = ('TPU v2', 'TPU v3', 'TPU7x')


def chips(devices: int, device_kind: str) -> float:
    """Convert a number of JAX devices to a number of chips."""
    return devices / 2 if device_kind.startswith(_HALF_CHIPS) else float(devices)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak bf16 FLOP/s of one device, None if unknown.

    Args:
      device_kind: Value of `jax.devices()[0].device_kind`, for example
        `NVIDIA A100-SXM4-80GB` or `TPU v5 lite`. Slices of a GPU (MIG) are unknown.
    """
    if _UNKNOWN.search(device_kind):
        return None
    names = (n for n in PEAK_FLOPS if re.search(rf'\b{re.escape(n)}\b', device_kind))
    name = max(names, key=len, default=None)
    return None if name is None else PEAK_FLOPS[name]


def mfu(flops_per_step: float, seconds: float, n_devices: int, device_kind: str) -> float | None:
    """Compute model FLOPs utilization, 0 to 1 (Chowdhery et al. 2022); None without a peak.

    Args:
      flops_per_step: FLOPs of all devices together, without recomputation.
      seconds: Time of that step.
      n_devices: Number of devices.
      device_kind: See `peak_flops`.
    """
    peak = peak_flops(device_kind)
    return None if peak is None else flops_per_step / (seconds * n_devices * peak)


ParameterRow = dict[str, Any]


def fold_repeats(rows: Sequence[ParameterRow]) -> list[ParameterRow]:
    """Fold consecutive equal blocks, such as block_0 ... block_11, into one.

    Args:
      rows: Rows with `path`, `shape`, `dtype` and `count`, in natural order.

    Returns:
      Rows with the number of repetitions as `times`; their path contains `block_{0..11}`, and
      `count` is the sum over repetitions.
    """
    tree: dict[str, Any] = {}
    for row in rows:
        node = tree
        *parents, leaf = row['path'].split('/')
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = [row]
    return list(_rows(tree, (), 1))


def _rows(tree: Mapping[str, Any], path: tuple[str, ...], times: int) -> Iterator[ParameterRow]:
    for name, repeats, node in _runs(tree):
        parts, total = (*path, name), times * repeats
        if isinstance(node, Mapping):
            yield from _rows(node, parts, total)
        else:
            (row,) = node
            yield row | {'path': '/'.join(parts), 'count': row['count'] * total, 'times': total}


def _runs(tree: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """Find each run of equal nodes with consecutive numbers: its name, length and first node."""
    entries = list(tree.items())
    while entries:
        name, node = entries.pop(0)
        stem, first_number = _split_number(name)
        count = 1
        if first_number is not None:
            while entries and _follows(entries[0], stem, first_number + count, node):
                entries.pop(0)
                count += 1
        last = (first_number or 0) + count - 1
        yield (name if count == 1 else f'{stem}{{{first_number}..{last}}}'), count, node


def _follows(entry: tuple[str, Any], stem: str, number: int, node: Any) -> bool:
    return _split_number(entry[0]) == (stem, number) and _form(entry[1]) == _form(node)


def _split_number(name: str) -> tuple[str, int | None]:
    """Split a trailing number off a name: `block_11` -> ('block_', 11)."""
    match = re.fullmatch(r'(.*_)(\d+)', name)
    return (match[1], int(match[2])) if match else (name, None)


def _form(node: Any) -> Hashable:
    """Return a node's names, shapes and dtypes, by which nodes are compared."""
    if isinstance(node, Mapping):
        return tuple((name, _form(inner)) for name, inner in node.items())
    return tuple(node[0]['shape']), node[0]['dtype']
