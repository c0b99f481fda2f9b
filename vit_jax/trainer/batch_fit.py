"""Largest batch of an evaluation that fits into the memory of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from vit_jax.data.batches import Shape
from vit_jax.errors import UserError
from vit_jax.profiling.preflight import largest_that_fits
from vit_jax.runtime import environment, sharding
from vit_jax.trainer.evaluate import IN_FLIGHT
from vit_jax.trainer.measure import Measurement

# For a step, as allocation leaves gaps: of the memory that JAX allocates from. This is nearly all
# of a TPU's, and 75 % of a GPU's by default (XLA_CLIENT_MEM_FRACTION).
DEVICE_SHARE = 0.9
# Of a host's free memory, if its CPU is the device and batches are read at the same time.
HOST_SHARE = 0.5
FIRST_TRIED = 64  # examples per device


def largest_batch(measurement: Measurement) -> int:
    """Return the largest batch size that fits, within an eighth; at most the largest data set.

    The steps are compiled for the sizes tried, but not run.

    Args:
      measurement: Prepared with any batch size.

    Raises:
      UserError: if not even one example a device fits, the memory of the devices is unknown,
        batches are not counted in examples, or several processes share them.
    """
    if jax.process_count() > 1:
        raise UserError('--batch-size fit: several processes share a batch; give a number')
    layout, programs = measurement.steps.layout, list(_programs(measurement))
    variables = sharding.abstract_target(layout, measurement.trained.variables)
    unit, limit = layout.num_shards, memory(layout.mesh.devices.flat[0], layout.num_shards)

    def fits(units: int) -> bool:
        return all(
            _bytes_needed(step, variables, _batch(layout, shape, units * unit)) <= limit
            for step, shape, _ in programs
        )

    most = -(-max(examples for *_, examples in programs) // unit)
    if not (units := largest_that_fits(fits, min(FIRST_TRIED, most), most)):
        raise UserError(f'--batch-size fit: not even {unit} examples fit into {limit:,.0f} bytes')
    return units * unit


def memory(device: jax.Device, devices: int) -> float:
    """Bytes that a program may take on a device.

    On a GPU, a share of JAX's own pool: the fraction of the memory that JAX preallocates.

    Args:
      device: Device of an evaluation.
      devices: Number of devices, which share the host's memory if they are its CPU.

    Raises:
      UserError: if it is unknown.
    """
    if limit := (device.memory_stats() or {}).get('bytes_limit'):
        return DEVICE_SHARE * limit
    if device.platform == 'cpu' and (free := environment.available_memory()):
        return HOST_SHARE * free / devices
    raise UserError(f'--batch-size fit: memory of {device.device_kind} is unknown; give a number')


def _programs(measurement: Measurement) -> Iterator[tuple[Any, Shape, int]]:
    """Yield the step, the largest rows and the number of examples of every evaluated data set."""
    for evaluation in measurement.evaluations.values():
        steps = measurement.steps
        evaluator = evaluation.evaluator
        step = steps.predicting(evaluator) if evaluator else steps.evaluate
        for data in (evaluation.data, evaluation.fit):
            if data is None:
                continue
            shape = data.shapes[-1]
            if shape.slots or len({kind.rows for kind in data.shapes}) > 1:
                raise UserError(
                    f'--batch-size fit counts examples, and batches of {data.source.title} differ '
                    'in their number; give a number'
                )
            yield step, shape, len(data.source)


def _batch(layout: sharding.Layout, shape: Shape, rows: int) -> Any:
    """Return the abstract arrays of a batch of `rows` rows."""
    arrays = {k: jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for k, s in shape.arrays.items()}
    return sharding.abstract_batch(layout, arrays)


def _bytes_needed(step: Any, variables: Any, batch: Any) -> float:
    """Bytes on a device for a step and for the batches that wait."""
    try:
        compiled = step.lower(variables, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' in str(error):
            return float('inf')
        raise
    sizes = compiled.memory_analysis()
    waiting = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in batch.values()
    )
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes
        + IN_FLIGHT * waiting
    )
