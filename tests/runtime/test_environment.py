"""The cores of a process, within all of their limits, and memory that stays with it."""

import os
import platform
import subprocess
import sys

import pytest

import vit_jax
from vit_jax.runtime import environment, processes


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Write control groups: the text of /proc/self/cgroup, and files by their paths."""
    monkeypatch.setattr(environment, 'OWN_CGROUPS', tmp_path / 'own')
    monkeypatch.setattr(environment, 'CGROUPS', tmp_path / 'fs')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {*range(64)}, raising=False)
    monkeypatch.delenv('SLURM_CPUS_PER_TASK', raising=False)

    def write(own, files):
        (tmp_path / 'own').write_text(own)
        for name, text in files.items():
            (tmp_path / 'fs' / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / 'fs' / name).write_text(text)

    return write


def test_without_limits_they_are_those_of_the_affinity(groups):
    assert environment.available_cores() == 64
    groups('0::/\n', {'cpu.max': 'max 100000\n'})
    assert environment.available_cores() == 64
    groups('1:cpu:/\n', {'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'})
    assert environment.available_cores() == 64


def test_a_quota_is_rounded_up(groups):
    groups('0::/pod\n', {'pod/cpu.max': '250000 100000\n'})
    assert environment.available_cores() == 3
    groups('0::/pod\n', {'pod/cpu.max': '5000 100000\n'})
    assert environment.available_cores() == 1


def test_the_quota_of_a_group_above_holds_too(groups):
    files = {'a/cpu.max': '400000 100000', 'a/b/cpu.max': '800000 100000', 'a/b/c/cpu.max': 'max 1'}
    groups('0::/a/b/c\n', files)
    assert environment.available_cores() == 4


def test_a_group_of_version_1(groups):
    named = {'cpu/job/cpu.cfs_quota_us': '600000', 'cpu/job/cpu.cfs_period_us': '100000'}
    groups('7:memory:/job\n4:cpu,cpuacct:/job\n0::/\n', named)
    assert environment.available_cores() == 6


def test_processes_of_a_job_on_one_host_share_its_cores(groups, monkeypatch):
    monkeypatch.setattr(environment, 'host_id', lambda: 'a')
    every = [['a', [*range(64)]], ['b', [*range(64)]], ['a', [*range(32)]], ['a', [*range(64)]]]
    monkeypatch.setattr(environment, '_peer_cores', [])
    monkeypatch.setattr(processes, 'gather', lambda own: list(every))
    processes.share_cores()
    assert environment.available_cores() == 27, '32 of three processes, 32 of two'
    groups('0::/pod\n', {'pod/cpu.max': '1200000 100000\n'})
    assert environment.available_cores() == 4


def test_slurm_limits_a_task_but_does_not_add_cores(groups, monkeypatch):
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '12')
    assert environment.available_cores() == 12
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '128')
    assert environment.available_cores() == 64
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', 'many')
    assert environment.available_cores() == 64


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

with_glibc = pytest.mark.skipif(
    sys.platform != 'linux' or platform.libc_ver()[0] != 'glibc', reason='needs glibc'
)


def run(keep: str, **variables: str) -> tuple[int, bool, str]:
    """Page faults of 20 allocations of 32 MiB, whether the process id was kept, the arguments."""
    # NumPy asks for huge pages of its own accord, which would take most of the faults away.
    env = {k: v for k, v in os.environ.items() if k != environment.MALLOC_VARIABLE}
    env |= {'NUMPY_MADVISE_HUGEPAGE': '0', **variables}
    words = [sys.executable, '-c', PROGRAM.format(keep=keep), 'a', 'b c']
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    faults, pid, arguments = output.strip().split(' ', 2)
    return int(faults), int(pid) == process.pid, arguments


@with_glibc
@pytest.mark.slow
def test_freed_memory_is_used_again_without_page_faults():
    kept, same_process, arguments = run(KEEP)
    assert same_process
    assert arguments == "['a', 'b c']"
    assert kept < 2_000
    assert kept < run('')[0] / 10


@with_glibc
@pytest.mark.slow
def test_tunables_of_the_user_stand():
    assert run(KEEP, GLIBC_TUNABLES='')[0] > 10 * run(KEEP)[0]


@with_glibc
@pytest.mark.slow
def test_a_running_process_keeps_it_too_unless_tunables_are_set():
    now = KEEP.replace('keep_freed_memory', 'keep_freed_memory_from_now')
    kept = run(now)[0]
    assert kept < run(now, GLIBC_TUNABLES='')[0] / 5


def test_a_checkout_has_a_commit_and_an_installed_package_has_none(repo, monkeypatch, tmp_path):
    if not (repo / '.git').exists():
        pytest.skip('not a checkout')
    head = subprocess.check_output(['git', '-C', str(repo), 'rev-parse', 'HEAD'], text=True)
    commit, _, change = environment.versions()['commit'].partition('-')
    assert head.startswith(commit) and len(commit) >= 12 and change in ('', 'dirty')
    monkeypatch.setattr(vit_jax, '__file__', str(tmp_path / 'vit_jax' / '__init__.py'))
    environment.commit.cache_clear()
    assert 'commit' not in environment.versions()
    environment.commit.cache_clear()
