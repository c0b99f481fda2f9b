"""JAX's cache of compiled programs, by default in the user's cache folder and of bounded size.

It is one of `caches`. `JAX_COMPILATION_CACHE_DIR` names another folder without a limit, and
`JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import re
import shutil

import jax
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.runtime import caches

CPU_INFO = pathlib.Path('/proc/cpuinfo')
MIN_FREE_BYTES = 2**28  # on the disk; a truncated entry would be read at every start


def enable() -> None:
    """Keep compiled programs across processes, if their folder is writable."""
    if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
        folder = _folder()
        jax.config.update('jax_compilation_cache_dir', str(folder) if _usable(folder) else None)
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
        # Half of a short command's compilations are of programs that take less than a second.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def enable_for_python() -> None:
    """Keep compiled programs of a call from Python, unless the caller configured JAX's cache."""
    if jax.config.values['jax_compilation_cache_dir'] is None:
        enable()
        # JAX decides at the first compilation of a process, which may have been the caller's.
        compilation_cache.reset_cache()


def describe_cache() -> str:
    """Describe in a line where compiled programs are kept."""
    folder = jax.config.values['jax_compilation_cache_dir']
    if not jax.config.values['jax_enable_compilation_cache']:
        return 'compiled programs are not kept: JAX_ENABLE_COMPILATION_CACHE is false'
    if not folder:
        return 'compiled programs are not kept: set JAX_COMPILATION_CACHE_DIR to a folder'
    return f'compiled programs are kept in {folder}'


def _folder() -> pathlib.Path:
    """Return the folder for this kind of machine; CPU programs depend on its features."""
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return caches.folder('xla') / f'{platform.machine() or "unknown"}-{kind}'


def _processor() -> str:
    """Return the known model and features of the processor."""
    with contextlib.suppress(OSError):
        lines = CPU_INFO.read_text().partition('\n\n')[0]
        return '\n'.join(
            re.findall(r'^(?:cpu family|model|flags|CPU part|Features)\b.*', lines, re.M)
        )
    return platform.processor()


def _usable(folder: pathlib.Path) -> bool:
    """Return whether programs can be written there, after deleting the least recently used ones."""
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # JAX's own limit locks the folder for every read, and a process that is killed while it
        # writes leaves an entry without a time, which stops all later writes.
        caches.trim('xla')
        return (
            os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > MIN_FREE_BYTES
        )
    except OSError:
        return False
