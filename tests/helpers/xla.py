"""How XLA compiles what the tests run, and for how many devices."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

KNOWN = 'TESTS_XLA_KNOWN'
FORCED_DEVICES = '--xla_force_host_platform_device_count'
# Programs of tests are compiled once and run for milliseconds, so compiling them is most of the
# suite's time; this way it takes a fifth. Tests marked `parity` compile as users do, unless
# TESTS_XLA is quick; all do so if it is default. TESTS_XLA=known leaves out the flags that an XLA
# other than the pinned one does not know, for it would abort.
QUICK = (
    '--xla_backend_optimization_level=0',
    '--xla_cpu_opt_preset=FAST_COMPILE',
    '--xla_cpu_use_fusion_emitters=false',
    '--xla_cpu_parallel_codegen_split_count=1',
)
# XLA's own values of these flags.
USUAL = {
    'xla_backend_optimization_level': 3,
    'xla_cpu_opt_preset': 'CPU_OPT_PRESET_DEFAULT',
    'xla_cpu_use_fusion_emitters': True,
    'xla_cpu_parallel_codegen_split_count': 32,
}


def xla_flags(devices: int) -> str:
    """The environment's flags with so many CPU devices; workers inherit what is already set."""
    given = os.environ.get('XLA_FLAGS', '').split()
    others = [flag for flag in given if not flag.startswith((FORCED_DEVICES, *QUICK))]
    return ' '.join([*others, *_quick(), f'{FORCED_DEVICES}={devices}'])


@contextlib.contextmanager
def as_users_do() -> Iterator[None]:
    """Compiles with XLA's own values of flags, here and in processes that are started."""
    from jax._src import compiler  # whose flags conftest sets before

    make, given = compiler.get_compile_options, os.environ['XLA_FLAGS']
    usual = {name: value for name, value in USUAL.items() if f'--{name}=' in given}

    def options(*args: Any, env_options_overrides: Any = None, **kwargs: Any) -> Any:
        overrides = {**usual, **(env_options_overrides or {})}
        return make(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, 'get_compile_options', options)
        patch.setenv('TESTS_XLA', 'default')
        yield


# In `make test` programs of such a test are compiled fast, in `make test-long` as users do as well.
compiled_both_ways = pytest.mark.parametrize(
    'way', ['fast', pytest.param('as users do', marks=[pytest.mark.parity, pytest.mark.long])]
)


def _quick() -> tuple[str, ...]:
    chosen = os.environ.get('TESTS_XLA')
    if chosen == 'known':
        # Workers and subprocesses inherit the answer.
        if KNOWN not in os.environ:
            os.environ[KNOWN] = ' '.join(filter(_is_known, QUICK))
        return tuple(os.environ[KNOWN].split())
    return () if chosen == 'default' else QUICK


def _is_known(flag: str) -> bool:
    """Whether XLA starts with a flag."""
    words = [sys.executable, '-c', 'import jax; jax.devices("cpu")']
    env = {**os.environ, 'XLA_FLAGS': flag, 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run(words, env=env, capture_output=True).returncode == 0


def use_one_device(patch: pytest.MonkeyPatch) -> None:
    """Makes this a machine with one device: programs are compiled in half the time."""
    use_devices(patch, 1)


def use_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """Makes this a machine with so many devices."""
    import jax  # whose flags conftest sets before

    devices = jax.devices()[:count]
    patch.setattr(jax, 'devices', lambda *args: devices)


PROGRAMS_PER_CONTEXT = 100


def share_contexts(patch: pytest.MonkeyPatch) -> None:
    """Lets programs that are lowered one after the other share their context of MLIR.

    Making one loads all dialects, which takes longer than lowering a small program. A context keeps
    the constants and names of its programs, so a new one is made from time to time.
    """
    from jax._src.interpreters import mlir  # whose flags conftest sets before

    make, lock, numbers = mlir.make_ir_context, threading.Lock(), itertools.count()
    held: list[object] = []

    def shared() -> object:
        with lock:
            if next(numbers) % PROGRAMS_PER_CONTEXT == 0:
                held[:] = [make()]
            return held[0]

    patch.setattr(mlir, 'make_ir_context', shared)
