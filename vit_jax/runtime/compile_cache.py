"""JAX's cache of compiled programs, by default in a folder of the user's and of bounded size.

`JAX_COMPILATION_CACHE_DIR` names another folder, which is left to its owner, and
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

MOST = 4 * 2**30  # bytes; the step of a ViT-B/16 takes a few million
CPU_INFO = pathlib.Path('/proc/cpuinfo')
LEAST_FREE = 2**28  # bytes on the disk; an entry that is cut short would be read at every start


def use() -> None:
    """Keep compiled programs across processes, if a folder for them can be written."""
    if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
        folder = _folder()
        jax.config.update('jax_compilation_cache_dir', str(folder) if _usable(folder) else None)
    if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
        # Half of a short command's compilations are of programs that take less than a second.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def note() -> str:
    """A line that says where compiled programs are kept."""
    folder = jax.config.values['jax_compilation_cache_dir']
    if not jax.config.values['jax_enable_compilation_cache']:
        return 'compiled programs are not kept: JAX_ENABLE_COMPILATION_CACHE is false'
    if not folder:
        return 'compiled programs are not kept: name a folder by JAX_COMPILATION_CACHE_DIR'
    return f'compiled programs are kept in {folder}'


def _folder() -> pathlib.Path:
    """The folder of this kind of machine: on CPUs programs are made for what the processor has."""
    home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return pathlib.Path(home, 'vit_jax', 'xla', f'{platform.machine() or "unknown"}-{kind}')


def _processor() -> str:
    """The model and features of the processor, as far as the system tells."""
    with contextlib.suppress(OSError):
        first = CPU_INFO.read_text().partition('\n\n')[0]
        return '\n'.join(
            re.findall(r'^(?:cpu family|model|flags|CPU part|Features)\b.*', first, re.M)
        )
    return platform.processor()


def _usable(folder: pathlib.Path) -> bool:
    """Whether programs can be written there; the longest unused make room for others."""
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _shrink(folder, MOST)
        return os.access(folder, os.W_OK | os.X_OK) and shutil.disk_usage(folder).free > LEAST_FREE
    except OSError:
        return False


def _shrink(folder: pathlib.Path, most: int) -> None:
    """Delete the files that were not used for longest, as far as there are more than `most` bytes.

    JAX's own bound locks the folder for every read, and a process that is killed while it writes
    leaves an entry without a time, after which nothing is written any more.
    """
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process shrinks it as well
            stat = file.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file))
    size = sum(size for _, size, _ in found)
    for _, bytes_, file in sorted(found):
        if size <= most:
            return
        file.unlink(missing_ok=True)
        size -= bytes_
