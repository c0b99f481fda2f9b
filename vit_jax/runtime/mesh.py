"""The mesh of a run's devices: slices outermost, then data, fsdp and tensor.

The chips of a TPU slice are connected by links of their own, slices by the data-center network,
which is some hundred times slower. So only the axis `slice` leaves a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.errors import UserError

SLICE = 'slice'
WITHIN = ('data', 'fsdp', 'tensor')
AXES = (SLICE, *WITHIN)
ROWS = ('data', 'fsdp')
BATCH = P((SLICE, *ROWS))


def make_mesh(
    devices: Sequence[jax.Device], fsdp: int = 1, tensor: int = 1, slices: int | None = None
) -> Mesh:
    """A mesh [slice, data, fsdp, tensor] over all of `devices`.

    Raises:
      UserError: if fsdp * tensor does not divide the devices of a slice, or for the reasons of
        `by_slice`.
    """
    parts = by_slice(devices, slices)
    each = len(parts[0])
    if fsdp < 1 or tensor < 1 or each % (fsdp * tensor):
        where = '' if len(parts) == 1 else f' of each of the {len(parts)} slices'
        raise UserError(
            f'config.parallel: fsdp={fsdp} times tensor={tensor} must divide '
            f'the {each} devices{where}'
        )
    # An axis may be part of a dimension of the slice: 4 of the 8 chips along one.
    place = partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    grids = [place((each // (fsdp * tensor), fsdp, tensor), part) for part in parts]
    return Mesh(np.stack(grids), AXES, axis_types=(AxisType.Auto,) * 4)


def by_slice(
    devices: Sequence[jax.Device], slices: int | None = None
) -> list[Sequence[jax.Device]]:
    """The devices of every slice, in the order of the slices.

    Args:
      devices: in the order of `jax.devices()`.
      slices: their number, by default that of the devices. Devices of one slice, and those that are
        not TPUs, are divided into so many parts.

    Raises:
      UserError: if slices differ in size, or are not as many as requested.
    """
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(_slice(device), []).append(device)
    parts = [found[index] for index in sorted(found)]
    if len(sizes := sorted({len(part) for part in parts})) > 1:
        raise UserError(f'the slices have {sizes[0]} to {sizes[-1]} devices: they must be alike')
    if slices in (None, len(parts)):
        return list(parts)
    if len(parts) > 1:
        raise UserError(
            f'config.parallel.slices={slices}: the devices are on {len(parts)} slices; '
            'leave the key out'
        )
    if slices < 1 or len(devices) % slices:
        raise UserError(f'config.parallel.slices={slices}: must divide the {len(devices)} devices')
    each = len(devices) // slices
    return [devices[first : first + each] for first in range(0, len(devices), each)]


def _slice(device: jax.Device) -> int:
    # Other platforms number hosts or processes so.
    return getattr(device, 'slice_index', 0) if device.platform == 'tpu' else 0


def tpu_here(devices: Iterable[jax.Device]) -> jax.Device | None:
    """The first TPU of these that this process can use; None if it has none, as ahead of time."""
    here = {*jax.local_devices()}
    return next((d for d in devices if d.platform == 'tpu' and d in here), None)
