import os
import platform
import subprocess
import sys

import pytest

from vit_jax.runtime import environment as environment_lib

PROGRAM = """
import os, resource, sys
{keep}
import numpy as np
np.ones(1 << 22)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(1 << 22)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults, os.getpid(), sys.argv[1:])
"""
KEEP = 'from vit_jax.runtime import environment; environment.keep_freed_memory()'

pytestmark = pytest.mark.skipif(
    sys.platform != 'linux' or platform.libc_ver()[0] != 'glibc', reason='needs glibc'
)


def run(keep: str, **environment: str) -> tuple[int, bool, str]:
    """Page faults of 20 allocations of 32 MiB, whether the process id was kept, the arguments."""
    # NumPy asks for huge pages of its own accord, which would take most of the faults away.
    env = {k: v for k, v in os.environ.items() if k != environment_lib.VARIABLE}
    env |= {'NUMPY_MADVISE_HUGEPAGE': '0', **environment}
    words = [sys.executable, '-c', PROGRAM.format(keep=keep), 'a', 'b c']
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    faults, pid, arguments = output.strip().split(' ', 2)
    return int(faults), int(pid) == process.pid, arguments


@pytest.mark.slow
def test_freed_memory_is_used_again_without_page_faults():
    kept, same_process, arguments = run(KEEP)
    assert same_process
    assert arguments == "['a', 'b c']"
    assert kept < 2_000
    assert kept < run('')[0] / 10


@pytest.mark.slow
def test_tunables_of_the_user_stand():
    assert run(KEEP, GLIBC_TUNABLES='')[0] > 10 * run(KEEP)[0]
