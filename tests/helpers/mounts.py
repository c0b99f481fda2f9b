"""File systems that refuse: small ones, and such that are read-only."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def mounted(folder: pathlib.Path, *words: str) -> Iterator[pathlib.Path]:
    """`mount WORDS FOLDER`, undone in the end; skips the test where that is not allowed."""
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(['mount', *words, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f'mounting takes root and the capability to: {error}')
    try:
        yield folder
    finally:
        subprocess.run(['umount', folder], check=True)


def small_disk(folder: pathlib.Path, size: int):
    """An empty file system of so many bytes."""
    return mounted(folder, '-t', 'tmpfs', '-o', f'size={size}', 'none')


def read_only(folder: pathlib.Path):
    """The folder, mounted read-only."""
    return mounted(folder, '-o', 'bind,ro', str(folder))
