"""The devices that a program is compiled for, by which its attention chooses a kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.nn.attention_choice import Devices, runs_on
from vit_jax.runtime import processes
from vit_jax.runtime.mesh import local_accelerator, usable_devices

Function = Callable[[], float]


def from_devices(devices: np.ndarray, **fields: Any) -> Devices:
    """Describe the devices of a mesh; `fields` are further fields of `Devices`."""
    measure, device = None, local_accelerator(devices.flat)
    if device is not None:
        several = len({d.process_index for d in devices.flat}) > 1
        measure = functools.partial(largest_over_processes, device, several)
    return Devices(device_kind(devices), measure=measure, **fields)


def device_kind(devices: np.ndarray) -> str:
    """JAX's name of the devices' kind."""
    return devices.flat[0].device_kind


def from_device(device: jax.Device | None = None) -> Devices:
    """Describe one device, by default the one that JAX computes on."""
    (one,) = (device,) if device is not None else jnp.zeros(()).devices()
    return from_devices(np.array([one]))


def traced_for(devices: Devices, step: Callable) -> Callable:
    """Wrap a step so that its model knows at trace time which devices it will run on."""

    @functools.wraps(step)
    def traced(*args: Any) -> Any:
        with runs_on(devices):
            return step(*args)

    return traced


def compiled(function: Callable) -> Callable:
    """`jax.jit` of a function that applies models, for the device that JAX computes on.

    Raises:
      UserError: as `usable_devices`.
    """
    usable_devices()
    return jax.jit(traced_for(from_device(), function))


def on_device(model: nn.Module, device: jax.Device) -> nn.Module:
    """A copy of the model whose `apply` traces for this device alone."""
    devices, plain = from_device(device), type(model)

    def apply(self: nn.Module, *args: Any, **options: Any) -> Any:
        with runs_on(devices):
            return plain.apply(self, *args, **options)

    # Set afterwards, since Flax would wrap it as a method of the model.
    own: Any = type(plain.__name__, (plain,), {'__module__': plain.__module__})
    own.apply = apply
    names = (field.name for field in dataclasses.fields(model))
    return own(**{n: getattr(model, n) for n in names if n not in ('parent', 'name')})


def largest_over_processes(device: jax.Device, several: bool, function: Function) -> float:
    """Call a function that computes on a device.

    Args:
      device: of this process.
      several: whether all processes of the job call this; then their largest result is returned.
      function: returns no NaN.
    """

    def found() -> float:
        with jax.default_device(device):
            own = function()
        return max(processes.gather(own), default=0.0) if several else own

    return in_own_thread(found)


def in_own_thread(function: Function) -> float:
    """Call a function in a thread of its own, outside of tracing."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
