"""Mesh of a run's devices: slices outermost, then data, fsdp and tensor.

The chips of a TPU slice are connected by dedicated links, slices by the data-center network,
which is some hundred times slower. So only the axis `slice` crosses slices.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import extras
from vit_jax.errors import Unavailable, UserError
from vit_jax.runtime import processes

SLICE = 'slice'
WITHIN = ('data', 'fsdp', 'tensor')
AXES = (SLICE, *WITHIN)
ROWS = ('data', 'fsdp')
BATCH = P((SLICE, *ROWS))
PyTree = Any
Rule = tuple[str, tuple[str | None, ...]]

_GPU_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin', 'jax_rocm60_plugin', 'jax_rocm7_plugin')
# Reasons that pass, or that another machine does not have.
_BUSY = re.compile(
    'already in use|resource busy|device_unavailable|aborted|not yet initialized|uncorrectable',
    re.IGNORECASE,
)
# The oldest NVIDIA driver for each CUDA release, by JAX's installation page.
_OLDEST_DRIVERS = {'12': 525, '13': 580}
_DRIVER_VERSION = pathlib.Path('/proc/driver/nvidia/version')  # absent without a driver, or on WSL
_WSL_GPU = pathlib.Path('/dev/dxg')
_GPUS = (pathlib.Path('/dev/nvidia0'), pathlib.Path('/dev/nvidiactl'), _WSL_GPU)
# Set where there are TPUs: libtpu alone may be installed as the compiler of `preflight`.
_TPU_VARIABLES = (
    'TPU_WORKER_HOSTNAMES',
    'TPU_PROCESS_ADDRESSES',
    'TPU_ACCELERATOR_TYPE',
    'JAX_FORCE_TPU_INIT',
)
# This warning comes at every start where only the compiler of `preflight` is installed. Where there
# is a GPU, `usable_devices` reports the rest as missing.
logging.getLogger('jax_plugins.xla_cuda13').addFilter(
    lambda record: 'cuda_plugin_extension is not found' not in record.getMessage()
)


def usable_devices() -> list[jax.Device]:
    """Return all JAX devices; CPUs only if no accelerator is intended.

    JAX itself falls back to CPUs if the plugin of an accelerator cannot start.

    Raises:
      UserError: if the first platform of `JAX_PLATFORMS` cannot be used or, without this variable,
        the accelerator of an installed plugin; `Unavailable` if it is busy or faulty.
    """
    with _held_back_log() as log_lines:
        devices, reason = _find_devices()
        if reason is not None and processes.count() > 1 and _peer_devices_missing(reason):
            raise reason
        accelerator = _intended_accelerator()
        if reason is not None or (devices[0].platform == 'cpu' and accelerator):
            text = _refusal(accelerator or 'the accelerator', log_lines, reason)
            raise (Unavailable if _BUSY.search(text) else UserError)(text) from reason
    return devices


def any_devices() -> list[jax.Device]:
    """Return all JAX devices; CPUs if an accelerator cannot start. For light work."""
    with _held_back_log():
        devices, reason = _find_devices()
    if reason is not None:
        jax.config.update('jax_platforms', 'cpu')
        return jax.devices()
    return devices


def _find_devices() -> tuple[list[jax.Device], Exception | None]:
    """Return the devices, or the reason why JAX can use none."""
    if not jax.config.values['jax_platforms'] and _is_installed('libtpu') and not _plugins():
        # libtpu would look for TPUs and print its own errors, past Python's logging.
        print('libtpu is installed and there is no TPU: using the CPU', file=sys.stderr)
        jax.config.update('jax_platforms', 'cpu')
    try:
        return jax.devices(), None
    except (RuntimeError, AssertionError) as error:  # without a message if no GPU is visible
        return [], error


def _peer_devices_missing(why: Exception) -> bool:
    """Return whether devices of another process are missing, which JAX also looks for."""
    return processes.reports_lost_peer(why) or 'DEADLINE_EXCEEDED' in str(why)


def _refusal(accelerator: str, log_lines: Sequence[str], why: Exception | None) -> str:
    reasons = [text for text in (*log_lines, str(why or '')) if text.strip()]
    for remaining in ('tpu', 'proxy'):  # JAX tries them too, and most machines have neither
        if remaining not in accelerator:
            reasons = [text for text in reasons if f"backend '{remaining}'" not in text]
    reason_line = reasons[0].strip().splitlines()[0] if reasons else 'no such device is visible'
    reason = reason_line.split(' (set JAX_PLATFORMS')[0][:300]
    fix = 'fix that'
    if 'cuda' in accelerator or "'gpu'" in accelerator:
        installed, fix = _cuda_installation('12' if 'cuda12' in accelerator else '13', reason)
        reason += f'; {installed}'
    return (
        f'{accelerator} cannot be used ({reason}): {fix}, or set JAX_PLATFORMS=cpu to use the CPU'
    )


def _cuda_installation(release: str, reason: str) -> tuple[str, str]:
    """Describe installed and missing parts of CUDA, and what to do, for an error message.

    Args:
      release: The major release of CUDA, '12' or '13'.
      reason: JAX's reason; it names libraries that are not installed or too old.
    """
    installed, missing, fixes = [], [], []
    for name in ('jax', f'jax-cuda{release}-plugin', f'jax-cuda{release}-pjrt'):
        try:
            installed.append(f'{name} {importlib.metadata.version(name)}')
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    oldest, driver = _OLDEST_DRIVERS[release], _driver_version()
    # Without a driver, JAX reports libraries as missing that are there.
    if missing or (driver and 'install' in reason):
        fixes.append(extras.install('cuda12' if release == '12' else 'cuda'))
    if driver:
        installed.append(f"NVIDIA's driver {driver}")
    elif not _WSL_GPU.exists():
        missing.append("NVIDIA's driver")
    if driver and int(driver.split('.')[0]) < oldest:
        other = f' or {extras.install("cuda12")}' if release == '13' else ''
        fixes.append(f'update the driver to {oldest} or newer{other}')
    elif "NVIDIA's driver" in missing:
        fixes.append(f"install NVIDIA's driver, {oldest} or newer, on a machine with an NVIDIA GPU")
    lacks = f'; missing: {", ".join(missing)}' if missing else ''
    return (
        f'installed: {", ".join(installed)}{lacks}',
        ' and '.join(fixes) or 'check that nvidia-smi lists the GPU',
    )


def _driver_version() -> str:
    """Return the version of NVIDIA's kernel driver; empty if there is none."""
    with contextlib.suppress(OSError):
        if version := re.search(r'Kernel Module.*?\s(\d+(?:\.\d+)+)', _DRIVER_VERSION.read_text()):
            return version[1]
    return ''


def _intended_accelerator() -> str:
    """Return the accelerator to use, for a message; empty if it is the CPU."""
    if platforms := jax.config.values['jax_platforms']:
        first = platforms.split(',')[0]
        return '' if first == 'cpu' else f'the platform {first!r} of JAX_PLATFORMS'
    if os.environ.get('JAX_PLATFORM_NAME', '').lower() == 'cpu':
        return ''
    plugins = _plugins()
    return f'the accelerator of the installed plugin {plugins[0]!r}' if plugins else ''


def _plugins() -> list[str]:
    """Names of installed plugins for accelerators."""
    plugins = [entry.value for entry in importlib.metadata.entry_points(group='jax_plugins')]
    if (folder := importlib.util.find_spec('jax_plugins')) is not None:
        names = pkgutil.iter_modules(folder.submodule_search_locations)
        plugins += [f'jax_plugins.{module.name}' for module in names]
    plugins += [name for name in _GPU_PLUGINS if _is_installed(name)]
    if not any(map(_is_installed, _GPU_PLUGINS)) and not any(path.exists() for path in _GPUS):
        # Without its plugin package, XLA for CUDA is the compiler of `preflight`.
        plugins = [name for name in plugins if not name.startswith('jax_plugins.xla_cuda')]
    tpus = processes.on_tpu_vm() or any(os.environ.get(name) for name in _TPU_VARIABLES)
    if tpus and (_is_installed('libtpu') or os.environ.get('TPU_LIBRARY_PATH')):
        plugins.append('libtpu')
    return plugins


def _is_installed(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.distribution(name))
    return False


@contextlib.contextmanager
def _held_back_log() -> Iterator[list[str]]:
    """Hold back what JAX logs while it looks for devices, tracebacks included.

    Yields:
      Reasons why plugins cannot start; records without an exception are logged at the end.
    """
    log, reasons, records = logging.getLogger('jax'), list[str](), []

    def hold(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            records.append(record)
        if error is not None or record.getMessage().startswith('Unable to initialize'):
            reasons.append(str(error or record.getMessage()))
        return False

    holder = logging.Handler()
    holder.addFilter(hold)
    level, handlers, propagates = log.level, log.handlers, log.propagate
    displayed = log.getEffectiveLevel()
    log.setLevel(min(displayed, logging.INFO))  # a TPU that cannot start is logged as INFO
    log.handlers, log.propagate = [holder], False
    try:
        yield reasons
    finally:
        log.setLevel(level)
        log.handlers, log.propagate = handlers, propagates
    for record in records:
        if record.levelno >= displayed:
            log.handle(record)


def make_mesh(
    devices: Sequence[jax.Device], fsdp: int = 1, tensor: int = 1, slices: int | None = None
) -> Mesh:
    """Return a mesh [slice, data, fsdp, tensor] over all of `devices`.

    Raises:
      UserError: if fsdp * tensor does not divide the devices of a slice, or as `by_slice`.
    """
    devices_by_slice = by_slice(devices, slices)
    size = len(devices_by_slice[0])
    if fsdp < 1 or tensor < 1 or size % (fsdp * tensor):
        per_slice = (
            '' if len(devices_by_slice) == 1 else f' of each of the {len(devices_by_slice)} slices'
        )
        raise UserError(
            f'config.parallel: fsdp={fsdp} times tensor={tensor} must divide '
            f'the {size} devices{per_slice}'
        )
    # An axis may be part of a dimension of the slice: 4 of the 8 chips along one.
    place = partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    grids = [place((size // (fsdp * tensor), fsdp, tensor), part) for part in devices_by_slice]
    return Mesh(np.stack(grids), AXES, axis_types=(AxisType.Auto,) * 4)


def by_slice(
    devices: Sequence[jax.Device], slices: int | None = None
) -> list[Sequence[jax.Device]]:
    """Group devices by slice, in the order of the slices.

    Args:
      devices: Devices in the order of `jax.devices()`.
      slices: Number of slices, by default the devices' number. Devices of one slice, and devices
        that are not TPUs, are divided into as many parts.

    Raises:
      UserError: if slices differ in size, or their number is not the requested one.
    """
    by_index: dict[int, list[jax.Device]] = {}
    for device in devices:
        # On other platforms `slice_index` is the number of the host or process.
        index = getattr(device, 'slice_index', 0) if device.platform == 'tpu' else 0
        by_index.setdefault(index, []).append(device)
    groups = [by_index[index] for index in sorted(by_index)]
    if len(sizes := sorted({len(part) for part in groups})) > 1:
        raise UserError(f'the slices have {sizes[0]} to {sizes[-1]} devices: must be equal')
    if slices in (None, len(groups)):
        return list(groups)
    if len(groups) > 1:
        raise UserError(
            f'config.parallel.slices={slices}: the devices are on {len(groups)} slices; '
            'leave the key out'
        )
    if slices < 1 or len(devices) % slices:
        raise UserError(f'config.parallel.slices={slices}: must divide the {len(devices)} devices')
    size = len(devices) // slices
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def trace_on(mesh: Mesh, function: Callable) -> Callable:
    """Make `mesh` the ambient mesh of a traced function, by which attention chooses kernels."""

    @wraps(function)
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def compile_on_default_device(function: Callable) -> Callable:
    """Compile a function that applies models, for JAX's default device.

    Raises:
      UserError: as `usable_devices`.
    """
    usable_devices()
    devices = np.array([*jnp.zeros(()).devices()])
    return jax.jit(trace_on(Mesh(devices, ('data',), axis_types=(AxisType.Auto,)), function))


def check_rules(rules: Sequence[Rule]) -> None:
    """Raise UserError if a rule names an axis other than `WITHIN`."""
    for axis in (axis for _, axes in rules for axis in axes):
        if axis not in (None, *WITHIN):
            raise UserError(
                f'config.parallel.rules: {axis!r} is not an axis that parameters are split over; '
                f'use one of {", ".join(WITHIN)}'
            )


def shards_of(mesh: Mesh, count: int, process: int) -> tuple[int, ...]:
    """List which of a batch's `count` shards a process's devices hold, in ascending order.

    Processes may interleave in the mesh, as on v5e:4x4. Processes that together split parameters
    over `tensor` hold the same shards.
    """
    row_ranges: Mapping[Any, Any] = NamedSharding(mesh, BATCH).devices_indices_map((count,))
    local_rows = {
        rows.start or 0 for device, (rows,) in row_ranges.items() if device.process_index == process
    }
    return tuple(sorted(local_rows))


def leaf_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, rules: Sequence[Rule], min_size: int
) -> P:
    """Return the placement of one array: by the first rule that matches its name, else by fsdp.

    fsdp splits the largest dimension that the axis divides; arrays with fewer than `min_size`
    elements are replicated, as communicating their parts costs more than it saves.
    """
    for pattern, axes in rules:
        if re.search(pattern, name) and len(axes) == len(shape):
            return P(*axes)
    size = mesh.shape['fsdp']
    divisible = [i for i, n in enumerate(shape) if n % size == 0]
    if size == 1 or not divisible or np.prod(shape) < min_size:
        return P()
    split = max(divisible, key=lambda i: shape[i])
    return P(*['fsdp' if i == split else None for i in range(len(shape))])


def spread_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Split an array over all devices of a slice, if they divide one of its dimensions.

    Args:
      spec: Spec of the array, without the axis of slices.
      shape: Shape of the array.
      mesh: Mesh of `make_mesh`.
    """
    split = [_names(part) for part in (*spec, *[None] * (len(shape) - len(spec)))]
    used = {name for names in split for name in names}
    unused = tuple(name for name in WITHIN if name not in used and mesh.shape[name] > 1)
    ways = math.prod(mesh.shape[name] for name in unused)
    sizes = [
        n // math.prod(mesh.shape[name] for name in names)
        for n, names in zip(shape, split, strict=True)
    ]
    divisible = [i for i, n in enumerate(sizes) if n % ways == 0]
    if ways > 1 and divisible:
        split[max(divisible, key=lambda i: sizes[i])] += unused
    return P(*[names or None for names in split])


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def sum_over_slices(grads: PyTree, spec_of: Callable[[Any, Any], P], mesh: Mesh) -> PyTree:
    """Sum gradients over slices, in a step that every slice runs on its own rows.

    The devices of a slice have the same gradients, and each sends only its part to other slices.

    Args:
      grads: Gradients of a slice.
      spec_of: Function (path, leaf) -> placement.
      mesh: Mesh of `make_mesh`.
    """

    def place(spread: bool, path: Any, leaf: jax.Array) -> jax.Array:
        spec = spec_of(path, leaf)
        spec = spread_spec(spec, leaf.shape, mesh) if spread else spec
        return jax.lax.with_sharding_constraint(leaf, spec)

    # Without the barriers the compiler undoes the change of shape.
    def as_matrix(path: Any, leaf: jax.Array) -> jax.Array:
        shape = matrix_shape(spread_spec(spec_of(path, leaf), leaf.shape, mesh), leaf)
        return leaf if shape == leaf.shape else jax.lax.optimization_barrier(leaf.reshape(shape))

    def restored(part: jax.Array, leaf: jax.Array) -> jax.Array:
        same = part.shape == leaf.shape
        return part if same else jax.lax.optimization_barrier(part).reshape(leaf.shape)

    place_all = jax.tree_util.tree_map_with_path
    sums = jax.lax.psum(place_all(as_matrix, place_all(partial(place, True), grads)), SLICE)
    sums = jax.tree.map(restored, sums, grads)
    # Placed twice: otherwise the compiler may gather the parts before it sums them.
    return place_all(partial(place, False), place_all(partial(place, True), sums))


def matrix_shape(spec: P, leaf: Any) -> tuple[int, ...]:
    """Return the shape in which an array crosses slices: a matrix, if its parts stay contiguous.

    TPUs pad the last two dimensions to tiles of 8 x 128, and send the padding too: for a kernel
    [768 3 12 64] nearly three times its size.
    """
    split = [i for i, names in enumerate(spec) if names]
    if leaf.ndim < 3 or len(split) != 1 or split[0] not in (0, leaf.ndim - 1):
        return leaf.shape
    size = leaf.shape[split[0]]
    columns = leaf.size // size
    return (size, columns) if split[0] == 0 else (columns, size)
