"""A malloc that keeps freed memory: XLA's CPU runtime allocates its buffers anew at every step."""

from __future__ import annotations

import os
import sys

VARIABLE = 'GLIBC_TUNABLES'
# Huge pages, in one arena that grows by brk alone and never returns freed memory.
TUNABLES = ':'.join(
    f'glibc.malloc.{name}={value}'
    for name, value in {
        'hugetlb': 1,
        'arena_max': 1,
        'mmap_max': 0,
        'trim_threshold': 1 << 62,
    }.items()
)


def keep_freed_memory() -> None:
    """Restarts the command once, with a malloc that keeps freed memory.

    Otherwise a training step on a CPU returns gigabytes to the system and faults them in again
    page by page, which is 7 to 20 % of its time. glibc reads its tunables before `main`, so a
    running process cannot set all of them; exec keeps the process id. Nothing is done if the
    environment already has tunables (even empty ones, as in `GLIBC_TUNABLES= python -m vit_jax
    ...`), or on other systems than Linux.
    """
    if sys.platform == 'linux' and sys.executable and VARIABLE not in os.environ:
        os.environ[VARIABLE] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
