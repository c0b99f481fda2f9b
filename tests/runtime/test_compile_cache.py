"""Compiled programs are kept where the user can find them, and never at the cost of a run."""

import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions
from helpers.runs import digest
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.__main__ import main
from vit_jax.runtime import caches, compile_cache

CONFIG = [f'jax_{name}' for name in ('compilation_cache_dir', 'enable_compilation_cache')]
CONFIG += ['jax_persistent_cache_min_compile_time_secs']


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache folder of a user who names none to JAX."""
    before = {name: jax.config.values[name] for name in CONFIG}
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
    compilation_cache.reset_cache()
    yield tmp_path / 'home'
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def folder() -> pathlib.Path:
    compile_cache.enable()
    described = compile_cache.describe_cache()
    return pathlib.Path(described.removeprefix('compiled programs are kept in '))


def test_the_folder_is_the_users_unless_another_is_named(home, monkeypatch):
    assert folder().is_relative_to(home / 'vit_jax' / 'xla')
    assert folder().is_dir()
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '/elsewhere')
    jax.config.update('jax_compilation_cache_dir', '/elsewhere')
    assert folder() == pathlib.Path('/elsewhere')


def test_calls_from_python_keep_programs_unless_the_caller_chose_a_cache(home, tmp_path):
    jax.config.update('jax_compilation_cache_dir', None)
    jax.jit(lambda x: x + 1)(np.ones(3))  # after which JAX looks for a cache no more
    compile_cache.enable_for_python()
    jax.jit(lambda x: jnp.sin(x) @ x)(np.eye(5, dtype=np.float32))
    assert list(home.rglob('*-cache'))
    jax.config.update('jax_compilation_cache_dir', str(tmp_path))
    compile_cache.enable_for_python()
    assert compile_cache.describe_cache().endswith(str(tmp_path))


def test_machines_do_not_share_a_folder(home, tmp_path, monkeypatch):
    here, other = folder(), tmp_path / 'cpuinfo'
    other.write_text('flags : another\n\n')
    monkeypatch.setattr(compile_cache, 'CPU_INFO', other)
    assert folder().parent == here.parent and folder() != here


def test_programs_that_were_not_used_for_longest_make_room(home, monkeypatch):
    for i, name in enumerate(('new', 'old', 'middle')):
        file = folder() / name
        file.write_bytes(bytes(100))
        os.utime(file, (1000 * (3, 1, 2)[i],) * 2)
    monkeypatch.setattr(caches, 'limit_bytes', lambda kind: 250)
    assert sorted(file.name for file in folder().iterdir()) == ['middle', 'new']


@pytest.mark.fault(82)
def test_a_full_disk_gets_no_programs(home, monkeypatch):
    usage = shutil.disk_usage('/')._replace(free=1000)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    compile_cache.enable()
    assert mentions(compile_cache.describe_cache(), 'kept', 'JAX_COMPILATION_CACHE_DIR')


@pytest.mark.fault(82)
@pytest.mark.long
def test_a_damaged_program_is_compiled_again(home):
    def run() -> np.ndarray:
        jax.clear_caches()
        return np.asarray(jax.jit(lambda x: jnp.sin(x) @ x)(np.eye(7, dtype=np.float32)))

    kept = folder()
    right = run()
    entries = list(kept.glob('*-cache'))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-20])
    with pytest.warns(UserWarning, match='Error reading persistent compilation cache'):
        np.testing.assert_array_equal(run(), right)


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
@pytest.mark.long
def test_a_run_resumed_with_kept_programs_is_that_of_fresh_ones(home, repo, tmp_path):
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith('/cache_hits') else None
    )
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', '--config.total=4 steps']
    words += ['--config.every.eval=', '--config.every.checkpoint=2']
    jax.config.update('jax_enable_compilation_cache', False)
    assert main([*words, '--workdir', str(tmp_path / 'fresh')]) == 0
    jax.config.update('jax_enable_compilation_cache', True)
    for stop, code in (('2', 75), ('9', 0)):
        jax.clear_caches()
        compilation_cache.reset_cache()
        hits.clear()
        assert main([*words, '--workdir', str(tmp_path / 'kept'), '--stop-at', stop]) == code
    assert hits
    assert digest(tmp_path / 'kept') == digest(tmp_path / 'fresh')
