"""How XLA compiles what the tests run, and for how many devices."""

from __future__ import annotations

import os

import pytest

FORCED_DEVICES = '--xla_force_host_platform_device_count'
# Programs of tests are compiled once and run for milliseconds, so compiling them is most of the
# suite's time; this way it takes a fifth. TESTS_XLA=default compiles as users do, which is how
# `make test` runs the tests marked `parity`.
QUICK = (
    '--xla_backend_optimization_level=0',
    '--xla_cpu_opt_preset=FAST_COMPILE',
    '--xla_cpu_use_fusion_emitters=false',
    '--xla_cpu_parallel_codegen_split_count=1',
)


def xla_flags(devices: int) -> str:
    """The environment's flags with so many CPU devices; workers inherit what is already set."""
    given = os.environ.get('XLA_FLAGS', '').split()
    others = [flag for flag in given if not flag.startswith((FORCED_DEVICES, *QUICK))]
    quick = QUICK if os.environ.get('TESTS_XLA') != 'default' else ()
    return ' '.join([*others, *quick, f'{FORCED_DEVICES}={devices}'])


def use_one_device(patch: pytest.MonkeyPatch) -> None:
    """Makes this a machine with one device: programs are compiled in half the time."""
    use_devices(patch, 1)


def use_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """Makes this a machine with so many devices."""
    import jax  # whose flags conftest sets before

    devices = jax.devices()[:count]
    patch.setattr(jax, 'devices', lambda *args: devices)
