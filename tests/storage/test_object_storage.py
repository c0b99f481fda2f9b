"""Run folders on s3:// and gs://, in servers on this machine that speak the protocols of both."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from helpers import forked
from helpers.digests import tree_digest
from helpers.messages import mentions
from helpers.object_servers import SCHEMES, serve_bucket
from helpers.runs import undrawn  # noqa: F401
from helpers.xla import use_one_device
from PIL import Image
from sklearn.datasets import load_digits

from vit_jax.__main__ import main
from vit_jax.checkpoints import checkpointer, manifest
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.storage import lock, paths, run_folder, servers
from vit_jax.trainer import build

pytestmark = pytest.mark.slow

TOTAL = 6
FLAGS = {
    'total': f'{TOTAL} steps',
    'every.log': '1',
    'every.eval': '3',
    'every.checkpoint': '2',
    'checkpoint.keep_last': 2,
}
CONFIG = 'tests/helpers/linear.py'


@pytest.fixture(scope='module', params=SCHEMES)
def bucket(request):
    """A bucket, as in `s3://bucket`."""
    with serve_bucket(request.param) as url:
        yield url


# --- the runs ---


@pytest.fixture(autouse=True)
def at_the_root(repo, monkeypatch, one_device):
    monkeypatch.chdir(repo)


@pytest.fixture
def impatient(monkeypatch):
    """The locks of killed runs are taken over soon."""
    monkeypatch.setattr(lock, 'lock', functools.partial(lock.lock, silent_seconds=1.0))


@pytest.fixture(scope='module')
def local(tmp_path_factory, repo):
    """An uninterrupted run on the disk."""
    folder = tmp_path_factory.mktemp('local') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repo)
        use_one_device(patch)
        assert main(train(folder)) == 0
    return folder


@pytest.fixture
def copied(bucket, local, request):
    """The same run in the bucket."""
    return copy_to(bucket, local, request.node.originalname)


def copy_to(bucket, local, name):
    folder = paths.path(f'{bucket}/{name}')
    paths.copy(local, folder)
    (folder / 'lock').unlink()  # in object storage that of a run that was killed
    return folder


def train(folder) -> list[str]:
    flags = [f'--config.{name}={value}' for name, value in FLAGS.items()]
    return ['train', '--config', CONFIG, *flags, '--workdir', os.fspath(folder)]


@functools.cache
def target():
    """The whole state, as it is restored."""
    config = load.load(CONFIG, [f'{k}={v}' for k, v in FLAGS.items()])
    return build.build(config).program.target


def digest(folder) -> str:
    """Of parameters, average, optimizer and counters of the last step."""
    return tree_digest(checkpointer.restore_step(folder / 'checkpoints', TOTAL, target()))


def losses(folder) -> list[tuple[int, float]]:
    lines = map(json.loads, paths.read_text(folder / 'metrics.jsonl').splitlines())
    return [(line['step'], line['train/loss']) for line in lines if 'train/loss' in line]


# One of as many devices as there are here: the only one of a process may round otherwise.
ON_ONE_DEVICE = """
import sys
import jax
from vit_jax.__main__ import main
devices = jax.devices()[:1]
jax.devices = lambda *args: devices
sys.exit(main(sys.argv[1:]))
"""


def kill_at_step(step: int, folder) -> None:
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL, 'text': True}
    env = {**os.environ, 'PYTHONUNBUFFERED': '1'}
    with forked.start(train(folder), env, code=ON_ONE_DEVICE, **pipes) as process:
        try:
            assert any(line.startswith(f'step {step}/') for line in process.stdout)
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.long
@pytest.mark.fault(49)
@pytest.mark.process
@pytest.mark.usefixtures('drawn_curves')
def test_a_killed_run_ends_as_if_nothing_had_happened(bucket, local, impatient, capsys, caplog):
    folder = paths.path(f'{bucket}/killed')
    kill_at_step(5, folder)
    left = run_folder.steps(folder)
    assert 2 in left and TOTAL not in left
    unfinished = set(run_folder.step_numbers(folder / 'checkpoints')) - set(left)
    assert paths.read_text(folder / 'lock')

    assert main(train(folder)) == 0
    assert mentions(caplog.text, 'waiting', '1')
    assert f'resumes after step {left[-1]} in {folder}' in capsys.readouterr().out
    assert digest(folder) == digest(local)
    assert losses(folder) == losses(local)
    assert len(losses(folder)) == TOTAL
    assert paths.read_text(folder / 'result.json') == (local / 'result.json').read_text()

    files = paths.files(folder)
    assert 'lock' not in files
    assert {'config.json', 'curves.png'} <= set(files)
    assert any('tfevents' in name for name in files)
    kept = {name.split('/')[1] for name in files if name.startswith('checkpoints/')}
    # A save that the kill interrupted was set aside.
    assert kept == {'4', '6'} | ({'rejected'} if unfinished else set())

    assert main(train(folder)) == 0  # it is complete
    assert 'complete' in capsys.readouterr().out


@pytest.mark.parametrize(
    'bucket',
    [SCHEMES[0], *(pytest.param(x, marks=pytest.mark.long) for x in SCHEMES[1:])],
    indirect=True,
)
def test_commands_read_it_as_one_on_the_disk(bucket, smoke_run, tmp_path, capsys):
    local = tmp_path / 'run'
    shutil.copytree(smoke_run, local, ignore=shutil.ignore_patterns('10'))
    copied = copy_to(bucket, local, 'commands')
    picture = tmp_path / 'digit.png'
    Image.fromarray((load_digits().images[3] * 15).astype(np.uint8)).save(picture)
    for words in (
        ['predict', str(picture), '--workdir'],
        ['inspect', '--workdir'],
        ['scaling', 'collect'],
    ):
        said = []
        for folder in (local, copied):
            assert main([*words, os.fspath(folder)]) == 0, words
            said.append(capsys.readouterr().out.replace(os.fspath(folder), 'RUN'))
        assert said[0] == said[1]


@pytest.mark.long
def test_a_damaged_step_is_passed_over(copied, local, caplog):
    (copied / 'result.json').unlink()
    arrays = next(name for name in paths.files(copied) if name.startswith('checkpoints/6/v'))
    (copied / arrays).write_bytes(b'torn')
    assert checkpointer.load_variables(copied / 'checkpoints')[0] == 4

    assert main(train(copied)) == 0
    assert mentions(caplog.text, 'changed')
    assert digest(copied) == digest(local)
    rejected = arrays.replace('checkpoints/', 'checkpoints/rejected/')
    assert (copied / rejected).read_bytes() == b'torn'


def test_a_step_without_its_mark_was_never_finished(copied):
    checkpoints = copied / 'checkpoints'
    (checkpoints / '6' / 'commit_success.txt').unlink()
    assert run_folder.steps(copied) == [4]
    manifest.clear_newer(checkpoints, 4)
    assert not any(name.startswith('6/') for name in paths.files(checkpoints))


@pytest.mark.long
def test_a_sweep_keeps_its_runs_there(bucket, tmp_path, capsys):
    file = tmp_path / 'sweep.py'
    file.write_text(
        'from vit_jax.sweeps.space import Sweep, grid\n'
        "FLAGS = {'total': '2 steps', 'every.eval': '1', 'every.checkpoint': '1'}\n"
        'def get_sweep(arg=None):\n'
        "    points = grid({'optim.lr': [0.001, 0.002]})\n"
        f'    return Sweep({CONFIG!r}, "test/accuracy", points=points, overrides=FLAGS)\n'
    )
    pytest.importorskip('optuna')
    folder = paths.path(f'{bucket}/sweep')
    assert main(['sweep', 'create', str(file), '--study', 's', '--workdir', str(folder)]) == 2
    assert '--storage' in capsys.readouterr().err

    place = ['--workdir', str(folder), '--storage', f'sqlite:///{tmp_path}/s.db']
    assert main(['sweep', 'create', str(file), '--study', 's', *place]) == 0
    work = ['sweep', 'work', 's', '--allow', 'helpers']
    with lock.lock(folder / 'claims' / '0'):  # as another worker does
        assert main([*work, *place]) == 0
        assert paths.read_text(folder / '0001' / 'config.json') is None
        assert paths.read_text(folder / '0002' / 'result.json')
    assert main([*work, '--workdir', str(folder)]) == 0  # the folder says where
    assert paths.read_text(folder / '0001' / 'result.json')
    assert not [name for name in paths.files(folder) if name.endswith('lock')]


def test_a_file_written_by_parts_appears_whole(bucket):
    target = paths.path(f'{bucket}/parts/a.npz')
    with paths.atomic_file(target) as file:
        file.write_bytes(b'whole')
        assert not target.exists()
    assert target.read_bytes() == b'whole'
    with pytest.raises(KeyError), paths.atomic_file(target) as file:
        file.write_bytes({}['a part'])
    assert target.read_bytes() == b'whole'


def test_a_folder_in_use(bucket, monkeypatch):
    monkeypatch.setattr(lock, '_HEARTBEAT_SECONDS', 0.2)
    folder = paths.path(f'{bucket}/in_use')
    with lock.lock(folder):
        with (
            pytest.raises(lock.InUse, match=rf'in use.*pid {os.getpid()}'),
            lock.lock(folder),
        ):
            pass
        assert (folder / 'lock').exists()  # its content is renewed meanwhile
    assert paths.read_text(folder / 'lock') is None


def test_who_comes_late_is_refused(bucket):
    if bucket.startswith('gs'):
        pytest.skip('fake-gcs-server carries out writes on an old generation; Google refuses them')
    store = lock.open_store(paths.path(f'{bucket}/late'))
    absent = store.read('lock').result().stamp.generation
    first = lock.Lease(store, 'lock', {'host': 'here'}, 0.1, lambda _: lock.InUse())
    assert not store.write('lock', b'{}', if_equal=absent).result().generation
    second = lock.Lease(store, 'lock', {'host': 'there'}, 0.1, lambda _: lock.InUse())
    assert not first.renew()
    first.release()
    assert second.renew()
    second.release()
    assert store.read('lock').result().state == 'missing'


@pytest.mark.parametrize('command', [train, lambda folder: ['evaluate', '--workdir', folder]])
def test_no_such_bucket(bucket, command, capsys):
    folder = bucket.replace('bucket', 'absent') + '/run'
    assert main(command(folder)) == 2
    said = capsys.readouterr().err
    assert said.startswith('error: ') and said.count('\n') == 1
    assert folder in said


# --- without a server ---


@pytest.mark.parametrize(('scheme', 'package'), [('s3', 's3fs'), ('gs', 'gcsfs')])
def test_a_missing_package_is_named(scheme, package, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, 'find_spec', lambda name, *of: None if name == package else find(name, *of)
    )
    assert main(train(f'{scheme}://bucket/run')) == 2
    assert f'{scheme}:// needs {package}: pip install ' in capsys.readouterr().err


@pytest.mark.parametrize(
    'command',
    [
        ['compare', 'gs://bucket/run'],
        ['inspect', '--checkpoint', 'gs://bucket/run'],
        ['inspect', '--checkpoint', 'gs://bucket/b16.npz'],
    ],
)
def test_without_a_network_google_is_not_waited_for(command, monkeypatch, capfd, caplog):
    pytest.importorskip('gcsfs')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', 'http://127.0.0.1:1')
    monkeypatch.setattr(servers, 'PAUSE', 0)
    before = time.monotonic()
    assert main(command) == 1
    assert time.monotonic() - before < 5
    error = capfd.readouterr().err
    assert 'nothing answers at 127.0.0.1:1 (Connection refused)' in error
    assert error.count('\n') == 1
    assert not caplog.messages


def test_a_bucket_has_a_name():
    for name in ('gs://', 's3:///'):
        with pytest.raises(UserError, match='BUCKET/FOLDER'):
            paths.path(name)


def test_to_s3_one_process_saves(monkeypatch):
    pytest.importorskip('s3fs')
    monkeypatch.setattr(checkpointer.jax, 'process_count', lambda: 2)
    with pytest.raises(UserError, match=r'processes.*gs://'):
        checkpointer.Checkpointer('s3://bucket/run/checkpoints')


@pytest.mark.long
def test_a_rehearsal_leaves_nothing(bucket, capsys):
    folder = paths.path(f'{bucket}/rehearsed')
    words = ['--config', CONFIG, '--workdir', f'{folder}/run', '--json']
    assert main(['rehearse', *words]) == 0, capsys.readouterr()
    rows = {row['name']: row for row in json.loads(capsys.readouterr().out)}
    assert {row['result'] for row in rows.values()} == {'ok'}
    assert mentions(rows['resumption']['note'], 'killed', 'step')
    assert paths.files(folder) == []
