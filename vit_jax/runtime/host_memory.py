"""The memory of this machine that this process may still use."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from vit_jax.runtime.cores import control_groups, read

MEMINFO = pathlib.Path('/proc/meminfo')


def available() -> int | None:
    """Bytes that are free or can be freed, within the limits of control groups; None if unknown."""
    return min([*_meminfo(), *_limits()], default=None)


def _meminfo() -> Iterator[int]:
    for line in read(MEMINFO).splitlines():
        name, _, rest = line.partition(':')
        if name == 'MemAvailable':
            yield int(rest.split()[0]) * 1024


def _limits() -> Iterator[int]:
    """Bytes left to this process by the limits of its control groups, and of those above."""
    for version, folder in control_groups('memory'):
        names = ('memory.max', 'memory.current')
        if version == 1:
            names = ('memory.limit_in_bytes', 'memory.usage_in_bytes')
        with contextlib.suppress(ValueError):  # no limit is `max`
            limit, used = (int(read(folder / name)) for name in names)
            yield max(limit - used, 0)
