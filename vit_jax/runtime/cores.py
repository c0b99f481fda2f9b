"""The CPU cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Iterator

CGROUPS = pathlib.Path('/sys/fs/cgroup')
OWN = pathlib.Path('/proc/self/cgroup')


def available() -> int:
    """Number of cores, at least 1, by the affinity, the quotas of control groups, and Slurm.

    A quota of 2.5 cores counts as 3. Slurm's number is `SLURM_CPUS_PER_TASK`, for clusters that do
    not bind tasks to cores.
    """
    limits = [_affinity(), *_quotas()]
    if (cores := os.environ.get('SLURM_CPUS_PER_TASK', '')).isdecimal():
        limits.append(int(cores))
    return max(1, math.ceil(min(limits)))


def _affinity() -> int:
    if hasattr(os, 'sched_getaffinity'):  # Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """The quotas, in cores, of this process's control groups and of all above them."""
    for version, folder in control_groups('cpu'):
        names = ('cpu.max',) if version == 2 else ('cpu.cfs_quota_us', 'cpu.cfs_period_us')
        yield from _quota(' '.join(read(folder / name) for name in names))


def control_groups(controller: str) -> Iterator[tuple[int, pathlib.Path]]:
    """Version and folder of this process's control groups, and of all above them."""
    for line in read(OWN).splitlines():
        _, controllers, path = line.split(':', 2)
        if not controllers:
            yield from ((2, folder) for folder in _upwards(CGROUPS, path))
        elif controller in controllers.split(','):
            yield from ((1, folder) for folder in _upwards(CGROUPS / controller, path))


def _quota(text: str) -> Iterator[float]:
    """The cores of `QUOTA PERIOD`, in microseconds; none if the quota is `max` or -1."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        quota, period = text.split()
        if float(quota) > 0:
            yield float(quota) / float(period)


def _upwards(root: pathlib.Path, path: str) -> list[pathlib.Path]:
    folder = root / path.lstrip('/')
    return [folder, *(up for up in folder.parents if up == root or root in up.parents)]


def read(path: pathlib.Path) -> str:
    """The text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ''
