"""Memory that a process keeps: XLA's CPU runtime asks for its buffers anew at every step."""

from __future__ import annotations

import os
import sys

VARIABLE = 'GLIBC_TUNABLES'
# Huge pages, in one arena that grows by brk alone and never gives back what is freed.
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
    """Starts the command again, once, with a malloc that keeps what the program frees.

    Otherwise a training step on a CPU returns gigabytes to the system and faults them in again
    page by page, which is 7 to 20 % of its time. glibc reads its tunables before `main`, so that a
    running process cannot set all of them; exec keeps the process id. An environment with tunables
    of its own is left alone (`GLIBC_TUNABLES= python -m vit_jax ...` has none), and other systems
    have none to set.
    """
    if sys.platform == 'linux' and sys.executable and VARIABLE not in os.environ:
        os.environ[VARIABLE] = TUNABLES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
