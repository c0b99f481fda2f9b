"""Accelerators that cannot start, on machines that have their plugin."""

import contextlib
import logging
import os
from types import SimpleNamespace

import jax
import pytest
from helpers.messages import says

from vit_jax.__main__ import main
from vit_jax.errors import UserError
from vit_jax.runtime import mesh

FAILS = """
def initialize():
    raise RuntimeError('no driver was found')
"""
FAILS_LATE = """
def initialize():
    from jax.extend import backend

    def start():
        raise RuntimeError('the device is already in use by process 7')

    backend.register_backend_factory('fake', start, priority=500, fail_quietly=False)
"""
METADATA = 'Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1.0\n'


@pytest.fixture
def plugin(tmp_path):
    """A function that installs a plugin of JAX, and returns the environment that has it."""

    def install(code):
        info = tmp_path / 'fake_plugin-1.0.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(METADATA)
        (info / 'entry_points.txt').write_text('[jax_plugins]\nfake = fake_plugin\n')
        (tmp_path / 'fake_plugin.py').write_text(code)
        return {'PYTHONPATH': str(tmp_path), 'JAX_PLATFORMS': ''}

    return install


def train(run_cli, folder, env):
    return run_cli(
        *('train', '--config', 'tests/helpers/linear.py', '--workdir', folder),
        env={'TESTS_UNDRAWN': '1', **env},
    )


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.fault(130)
@pytest.mark.parametrize(
    ('code', 'reason', 'exit_code'),
    [
        (FAILS, 'no driver was found', 2),
        pytest.param(FAILS_LATE, 'already in use', 1, marks=pytest.mark.long),  # which may pass
    ],
    ids=['plugin', 'backend'],
)
def test_a_plugin_that_cannot_start_is_one_line(run_cli, tmp_path, plugin, code, reason, exit_code):
    env = plugin(code)
    done = train(run_cli, tmp_path / 'run', env)
    assert done.returncode == exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert reason in line
    assert 'JAX_PLATFORMS=cpu' in line
    assert not (tmp_path / 'run').exists()
    if code == FAILS:
        shown = run_cli('inspect', '--config', 'tests/helpers/linear.py', env=env)
        assert shown.returncode == 0, shown.stderr


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.fault(130)
def test_a_platform_that_is_not_there_is_one_line(run_cli, tmp_path):
    if os.path.exists('/dev/nvidiactl'):
        pytest.skip('this machine has a GPU')
    done = train(run_cli, tmp_path / 'run', {'JAX_PLATFORMS': 'cuda'})
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert says(line, "'cuda' of JAX_PLATFORMS")
    assert f'jax {jax.__version__}' in line
    assert "NVIDIA's driver, 580 or newer" in line
    assert 'JAX_PLATFORMS=cpu' in line


@pytest.fixture
def no_platform(monkeypatch, tmp_path):
    """JAX, which has started with CPUs, may use any platform; modules in the folder are found."""
    before = jax.config.values['jax_platforms']
    jax.config.update('jax_platforms', None)
    monkeypatch.delenv('JAX_PLATFORM_NAME', raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    jax.config.update('jax_platforms', before)


@pytest.mark.fault(130)
@pytest.mark.usefixtures('no_platform')
@pytest.mark.parametrize('command', ['evaluate', 'predict', 'attention'])
def test_no_model_is_used_on_cpus_instead(capsys, smoke_run, tmp_path, plugin, command):
    plugin(FAILS)
    words = [command, '--workdir', str(smoke_run)]
    if command != 'evaluate':
        words += [str(tmp_path / 'photo.png'), '--out', str(tmp_path / 'out.png')]
    assert main(words) == 2
    assert 'cannot be used' in capsys.readouterr().err


@pytest.mark.fault(130)
@pytest.mark.usefixtures('no_platform')
@pytest.mark.parametrize(
    ('release', 'packages', 'driver', 'expected'),
    [
        ('13', ('plugin',), '', ['missing: jax-cuda13-pjrt', 'driver, 580 or newer, on a machine']),
        ('13', ('plugin', 'pjrt'), '550.54.15', ['driver 550.54.15', 'to 580', '.[cuda12]']),
        ('12', ('plugin', 'pjrt'), '470.82', ['jax-cuda12-pjrt 9.9', 'update the driver to 525']),
        ('13', ('plugin', 'pjrt'), '580.65.06', ['driver 580.65.06', 'nvidia-smi lists the GPU']),
    ],
)
def test_the_parts_of_cuda_are_named(tmp_path, monkeypatch, release, packages, driver, expected):
    """A CUDA plugin that is there and gives no device, with several drivers."""
    for name in packages:
        info = tmp_path / f'jax_cuda{release}_{name}-9.9.dist-info'
        info.mkdir()
        (info / 'METADATA').write_text(f'Name: jax-cuda{release}-{name}\nVersion: 9.9\n')
    for module in (f'jax_cuda{release}_plugin', 'nvidia'):
        (tmp_path / module).mkdir()
    monkeypatch.setattr(mesh, '_plugins', lambda: [f'jax_cuda{release}_plugin'])
    monkeypatch.setattr(mesh, '_DRIVER_VERSION', tmp_path / 'version')
    monkeypatch.setattr(mesh, '_WSL_GPU', tmp_path / 'dxg')
    if driver:
        line = f'NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sun Jul 27 2025\n'
        (tmp_path / 'version').write_text(line)
    with pytest.raises(UserError, match='cannot be used') as error:
        mesh.usable_devices()
    message = str(error.value)
    assert '\n' not in message
    assert all(words in message for words in [*expected, 'JAX_PLATFORMS=cpu'])


@pytest.mark.usefixtures('no_platform')
def test_xla_for_cuda_without_a_gpu_is_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(mesh.importlib.util, 'find_spec', lambda name: None)
    entry = SimpleNamespace(value='jax_plugins.xla_cuda13')
    monkeypatch.setattr(mesh.importlib.metadata, 'entry_points', lambda group: [entry])
    monkeypatch.setattr(mesh, '_is_installed', lambda name: False)
    monkeypatch.setattr(mesh, '_GPUS', (tmp_path / 'nvidia0',))
    assert mesh.usable_devices()[0].platform == 'cpu'
    (tmp_path / 'nvidia0').touch()
    with pytest.raises(UserError, match=r"\[cuda\]'"):
        mesh.usable_devices()


@pytest.mark.usefixtures('no_platform')
def test_libtpu_without_a_tpu_is_a_compiler(monkeypatch, tmp_path, capsys):
    (tmp_path / 'libtpu.py').touch()
    monkeypatch.setattr(mesh.processes, 'on_tpu_vm', lambda: False)
    for name in [name for name in os.environ if name.startswith('TPU_')]:
        monkeypatch.delenv(name)
    monkeypatch.delenv('JAX_FORCE_TPU_INIT', raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.suppress(UserError):  # of another plugin
        assert mesh.usable_devices()[0].platform == 'cpu'
        assert says(capsys.readouterr().err, 'libtpu', 'CPU')
        assert jax.config.values['jax_platforms'] == 'cpu'  # libtpu is not started
    jax.config.update('jax_platforms', None)
    monkeypatch.setenv('TPU_WORKER_HOSTNAMES', 'localhost')
    with pytest.raises(UserError, match='cannot be used'):
        mesh.usable_devices()


def test_the_compiler_alone_does_not_warn_at_every_start(caplog):
    log = logging.getLogger('jax_plugins.xla_cuda13')
    log.warning('cuda_plugin_extension is not found.')
    log.warning('another warning')
    assert caplog.messages == ['another warning']
