"""Environment of a process: CPU cores, host memory, software versions."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import vit_jax

CGROUPS = pathlib.Path('/sys/fs/cgroup')
OWN_CGROUPS = pathlib.Path('/proc/self/cgroup')
MEMINFO = pathlib.Path('/proc/meminfo')
NUMERIC_SETTINGS = (
    *('jax_threefry_partitionable', 'jax_default_prng_impl', 'jax_random_seed_offset'),
    *('jax_enable_x64', 'jax_default_matmul_precision'),
)
BOOT_ID = pathlib.Path('/proc/sys/kernel/random/boot_id')
SHARED = pathlib.Path('/dev/shm')
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
_peer_cores: list[list[int]] = []  # cores of the other processes of this job on this host
MALLOC_VARIABLE = 'GLIBC_TUNABLES'
# Huge pages, in one arena that grows only by brk and never returns freed memory.
MALLOC_TUNABLES = ':'.join(
    f'glibc.malloc.{name}={value}'
    for name, value in {
        'hugetlb': 1,
        'arena_max': 1,
        'mmap_max': 0,
        'trim_threshold': 1 << 62,
    }.items()
)
# The same, but for huge pages, by the numbers of malloc.h; -1 is the largest threshold.
MALLOPT = {'M_ARENA_MAX': (-8, 1), 'M_MMAP_MAX': (-4, 0), 'M_TRIM_THRESHOLD': (-1, -1)}


def available_cores() -> int:
    """Count usable cores, at least 1: within affinity, control group quotas and Slurm's limit.

    A quota of 2.5 cores counts as 3. Slurm's limit is `SLURM_CPUS_PER_TASK`, for clusters that do
    not bind tasks to cores. Processes of the job on the same host share its cores and quotas, once
    they know of each other, see `share_cores`.
    """
    peer_cores = collections.Counter(core for cores in _peer_cores for core in cores)
    limits = [sum(1 / (1 + peer_cores[core]) for core in affinity())]
    limits += [quota / (1 + len(_peer_cores)) for quota in _quotas()]
    if (cores := os.environ.get('SLURM_CPUS_PER_TASK', '')).isdecimal():
        limits.append(int(cores))
    return max(1, math.ceil(round(min(limits), 6)))


def share_cores(peers: Sequence[list[int]]) -> None:
    """Share cores with the job's other processes on this host, given the cores of each."""
    _peer_cores[:] = peers


def affinity() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):  # Linux has it
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def host_id() -> str:
    """Return a name of this machine, or of this container of it."""
    return f'{socket.gethostname()} {read_or_empty(BOOT_ID).strip()}'


def _quotas() -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups and their ancestors."""
    for version, folder in control_groups('cpu'):
        names = ('cpu.max',) if version == 2 else ('cpu.cfs_quota_us', 'cpu.cfs_period_us')
        yield from _quota(' '.join(read_or_empty(folder / name) for name in names))


def control_groups(controller: str) -> Iterator[tuple[int, pathlib.Path]]:
    """Yield version and folder of this process's control groups and their ancestors."""
    for line in read_or_empty(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(':', 2)
        if not controllers:
            yield from ((2, folder) for folder in _upwards(CGROUPS, path))
        elif controller in controllers.split(','):
            yield from ((1, folder) for folder in _upwards(CGROUPS / controller, path))


def _quota(text: str) -> Iterator[float]:
    """Yield the cores of `QUOTA PERIOD`, in microseconds; nothing if the quota is `max` or -1."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        quota, period = text.split()
        if float(quota) > 0:
            yield float(quota) / float(period)


def _upwards(root: pathlib.Path, path: str) -> list[pathlib.Path]:
    folder = root / path.lstrip('/')
    return [folder, *(up for up in folder.parents if up == root or root in up.parents)]


def read_or_empty(path: pathlib.Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ''


@functools.cache  # each save records them
def package_versions() -> Mapping[str, str]:
    """Return versions of this package and of packages that affect its results."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return types.MappingProxyType({'vit_jax': vit_jax.__version__, **versions})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages, and the commit of a checkout."""
    checkout = {'commit': revision} if (revision := commit()) else {}
    return {'python': platform.python_version(), **package_versions(), **checkout}


@functools.cache  # each save records it
def commit() -> str:
    """Git's commit of this package, with `-dirty` if files were changed; '' without a checkout."""
    root = pathlib.Path(vit_jax.__file__).parents[1]
    describe = ('describe', '--always', '--dirty', '--abbrev=12', '--exclude=*')
    if (root / '.git').exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ['git', '--no-optional-locks', '-C', str(root), *describe]
            completed = subprocess.run(
                command, capture_output=True, check=True, text=True, timeout=10
            )
            return completed.stdout.strip()
    return ''


def numeric_settings() -> dict[str, Any]:
    """Return JAX settings that affect random numbers, dtypes and matmul precision."""
    import jax

    return dict(zip(NUMERIC_SETTINGS, attrgetter(*NUMERIC_SETTINGS)(jax.config), strict=True))


def keep_freed_memory() -> None:
    """Restart the command once, with a malloc that keeps freed memory.

    Otherwise a training step on a CPU returns gigabytes to the system and faults them in again
    page by page, which is 7 to 20 % of its time. glibc reads its tunables before `main`, so a
    running process cannot set all of them; exec keeps the process id. Does nothing if the
    environment already has tunables (even empty ones, as in `GLIBC_TUNABLES= python -m vit_jax
    ...`), or on systems other than Linux.
    """
    if sys.platform == 'linux' and sys.executable and MALLOC_VARIABLE not in os.environ:
        os.environ[MALLOC_VARIABLE] = MALLOC_TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_freed_memory_from_now() -> None:
    """Make the running process's malloc keep freed memory, as far as possible.

    For calls from Python: a training step on a CPU takes 6 to 15 % less time, if nothing large was
    allocated before. Huge pages need `GLIBC_TUNABLES`, which is respected if set. Does nothing
    without glibc.
    """
    if sys.platform != 'linux' or MALLOC_VARIABLE in os.environ:
        return
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in MALLOPT.values():
            mallopt(parameter, value)


def available_memory() -> int | None:
    """Return available bytes within the limits of control groups; None if unknown."""
    return min([*_meminfo(), *_limits()], default=None)


def shared_memory() -> int | None:
    """Return free bytes in /dev/shm, often few in containers; None if it is missing."""
    with contextlib.suppress(OSError):
        status = os.statvfs(SHARED)
        return status.f_bavail * status.f_frsize
    return None


def _meminfo() -> Iterator[int]:
    for line in read_or_empty(MEMINFO).splitlines():
        name, _, value = line.partition(':')
        if name == 'MemAvailable':
            yield int(value.split()[0]) * 1024


def _limits() -> Iterator[int]:
    """Yield the bytes left by each memory limit of this process's control groups."""
    for version, folder in control_groups('memory'):
        names = ('memory.max', 'memory.current')
        if version == 1:
            names = ('memory.limit_in_bytes', 'memory.usage_in_bytes')
        with contextlib.suppress(ValueError):  # no limit is `max`
            limit, used = (int(read_or_empty(folder / name)) for name in names)
            yield max(limit - used, 0)
