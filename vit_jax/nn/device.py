"""Devices that a program is traced for, and one of their kind to try a kernel on.

A program runs on the devices of JAX's ambient mesh (`jax.set_mesh`), or on the default device.
Both belong to the keys of JAX's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType


class Target(NamedTuple):
    """Devices that a program will run on.

    Attributes:
      kind: JAX's name of the kind of device.
      devices: Their number.
      rows: Axes of the ambient mesh over which the compiler splits rows, none of which is manual.
      shards: Number of parts into which `rows` splits a batch.
      whole: Whether a device has whole rows, instead of some of the heads.
      assumed: Whether there is no ambient mesh: arrays may be on other devices, and on several.
    """

    kind: str
    devices: int = 1
    rows: tuple[str, ...] = ()
    shards: int = 1
    whole: bool = True
    assumed: bool = False


# The axis of a mesh that splits heads, see `runtime.mesh`.
HEADS_AXIS = 'tensor'


def current_target() -> Target:
    """Look up the target of the program that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None:
        config: Any = jax.config
        default = config.jax_default_device  # a device, the name of a platform, or None
        device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        return Target(device.device_kind, jax.device_count(device.platform), assumed=True)
    rows = tuple(name for name in automatic_axes(mesh) if name != HEADS_AXIS)
    split_axes = {*mesh.axis_names} - {*mesh.manual_axes} - {*rows}
    return Target(
        mesh.abstract_device.device_kind,
        mesh.size,
        rows,
        shards=math.prod(mesh.shape[name] for name in rows),
        whole=all(mesh.shape[name] == 1 for name in split_axes),
    )


def automatic_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """List the axes over which the compiler is free to split arrays."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Auto)


def local_accelerator(kind: str) -> jax.Device | None:
    """Find this process's first TPU or GPU of a kind, by JAX's name; None if there is none."""
    devices = (d for d in jax.local_devices() if d.platform in ('tpu', 'gpu'))
    return next((d for d in devices if d.device_kind == kind), None)


def measure(function: Callable[[], float], device: jax.Device, devices: int) -> float:
    """Call a function that computes on a device, while a program is being traced.

    Args:
      function: Function to call, which never returns NaN.
      device: Device of this process.
      devices: Number of devices of the program. If this process has fewer, all processes of the job
        call this, and get the largest of their results.
    """

    def largest() -> float:
        with jax.default_device(device):
            result = function()
        if devices <= jax.local_device_count():
            return result
        return float(np.max(multihost_utils.process_allgather(np.float32(result))))

    with futures.ThreadPoolExecutor(1) as pool:  # outside of the trace
        return pool.submit(largest).result()
