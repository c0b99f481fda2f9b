"""The cores that a process may use, as its affinity, its control groups and Slurm limit them."""

import os

import pytest

from vit_jax.runtime import environment


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Write control groups: the text of /proc/self/cgroup, and files by their paths."""
    monkeypatch.setattr(environment, 'OWN', tmp_path / 'own')
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


def test_slurm_limits_a_task_but_does_not_add_cores(groups, monkeypatch):
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '12')
    assert environment.available_cores() == 12
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '128')
    assert environment.available_cores() == 64
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', 'many')
    assert environment.available_cores() == 64
