"""The devices of a program, which its attention asks for while it is traced."""

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
from vit_jax.runtime.mesh import tpu_here, usable_devices


def of_devices(devices: np.ndarray, **fields: Any) -> Devices:
    """The devices of a mesh; `fields` are further ones of `Devices`."""
    return Devices(kind(devices), measure=_measure_on(devices), **fields)


def of_device(device: jax.Device | None = None) -> Devices:
    """One device, by default the one that JAX computes on."""
    (one,) = (device,) if device is not None else jnp.zeros(()).devices()
    return of_devices(np.array([one]))


def kind(devices: np.ndarray) -> str:
    """JAX's name of their kind."""
    return devices.flat[0].device_kind


def _measure_on(devices: np.ndarray) -> Callable[[Callable[[], float]], float] | None:
    """See `Devices.measure`."""
    device = tpu_here(devices.flat)
    if device is None:
        return None
    several = len({d.process_index for d in devices.flat}) > 1
    return functools.partial(largest, device, several)


def traced_for(devices: Devices, step: Callable) -> Callable:
    """A step whose model knows at trace time which devices it will run on."""

    @functools.wraps(step)
    def traced(*args: Any) -> Any:
        with runs_on(devices):
            return step(*args)

    return traced


def compiled(function: Callable) -> Callable:
    """`jax.jit` of a program of models for the device that JAX computes on.

    Raises:
      UserError: as `usable_devices`.
    """
    usable_devices()
    return jax.jit(traced_for(of_device(), function))


def placed(model: nn.Module, device: jax.Device) -> nn.Module:
    """The model, of a class whose `apply` says that the program runs on this device alone."""
    devices, plain = of_device(device), type(model)

    def apply(self: nn.Module, *args: Any, **options: Any) -> Any:
        with runs_on(devices):
            return plain.apply(self, *args, **options)

    # Set afterwards, or Flax takes it for a method of the model's own.
    own: Any = type(plain.__name__, (plain,), {'__module__': plain.__module__})
    own.apply = apply
    names = (field.name for field in dataclasses.fields(model))
    return own(**{n: getattr(model, n) for n in names if n not in ('parent', 'name')})


Function = Callable[[], float]


def largest(device: jax.Device, several: bool, function: Function) -> float:
    """Call a function that computes on a device.

    Args:
      device: of this process.
      several: whether all processes of the job call this; the result is then the largest of theirs.
      function: returns no NaN.
    """

    def found() -> float:
        with jax.default_device(device):
            own = function()
        return max(processes.gather(own), default=0.0) if several else own

    return apart(found)


def apart(function: Function) -> float:
    """Call a function in a thread of its own."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
