"""Storages for real: a PostgreSQL server of the test's own, and Optuna's dashboard on files."""

import contextlib
import errno
import json
import os
import pathlib
import pwd
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter

import pytest

pytest.importorskip('optuna')

import optuna
from helpers import forked
from helpers.mounts import small_disk
from helpers.studies import ids, make
from optuna.trial import TrialState

from vit_jax.__main__ import main
from vit_jax.errors import URLS, UserError
from vit_jax.storage import paths
from vit_jax.sweeps import picture, storages, study, worker
from vit_jax.sweeps.space import grid, log_uniform
from vit_jax.trainer import train

# --- PostgreSQL ---


def postgres_programs():
    """The folder of initdb and pg_ctl; Debian keeps it off the path."""
    folders = [*map(pathlib.Path, os.environ['PATH'].split(os.pathsep))]
    folders += sorted(pathlib.Path('/usr/lib/postgresql').glob('*/bin'), reverse=True)
    found = [f for f in folders if all(os.access(f / p, os.X_OK) for p in ('initdb', 'pg_ctl'))]
    return found[0] if found else pytest.skip('PostgreSQL is not installed: initdb, pg_ctl')


def postgres_user():
    """Whom the server runs as, which must not be root."""
    if os.geteuid():
        return None
    try:
        return pwd.getpwnam('postgres').pw_name
    except KeyError:
        return pytest.skip('PostgreSQL does not run as root, and there is no user postgres')


class Server(str):
    """The URL of a server, without the name of a database; `control` calls its pg_ctl."""

    def __new__(cls, url, control):
        made = super().__new__(cls, url)
        made.control = control
        return made


@pytest.fixture(scope='module')
def server():
    """A PostgreSQL server."""
    pytest.importorskip('psycopg')
    programs, user = postgres_programs(), postgres_user()
    folder = tempfile.mkdtemp(prefix='postgres')
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    if user:
        shutil.chown(folder, user)

    def run(program, *words):
        subprocess.run(
            [programs / program, '-D', f'{folder}/data', *words],
            user=user,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )

    def control(*words):
        run('pg_ctl', '-w', '-l', f'{folder}/log', '-o', options, *words)

    options = f'-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off'
    try:
        run('initdb', '-U', 'somebody', '--auth=trust', '-E', 'UTF8')
        control('start')
        yield Server(f'postgresql+psycopg://somebody@127.0.0.1:{port}', control)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run('pg_ctl', '-m', 'immediate', 'stop')
        shutil.rmtree(folder)


@pytest.fixture
def postgres(server, request):
    """The URL of an empty database."""
    psycopg, name = pytest.importorskip('psycopg'), re.sub(r'\W', '_', request.node.name)
    with psycopg.connect(f'{server}/postgres'.replace('+psycopg', ''), autocommit=True) as db:
        db.execute(f'CREATE DATABASE {name}')
    return f'{server}/{name}'


# Kills itself in the trial that the third argument names, after it has reported once.
WORKER = """
import os, signal, sys, time
from vit_jax.trainer import train
from vit_jax.sweeps import study, worker

def run(config, folder, report, **_):
    with open(sys.argv[2], 'a') as file:
        file.write(f'{folder.name} {config.optim.lr}\\n')
    report(1, {'test/accuracy': 0.1})
    if folder.name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    report(2, {'test/accuracy': 0.2})
    return {'test/accuracy': config.optim.lr}

train.train = run
worker.work(study.open_study('name', folder=sys.argv[1]))
"""


def start_worker(repo, folder, log, victim=''):
    return forked.start([folder, log, victim], os.environ, code=WORKER, cwd=repo)


@pytest.mark.slow
@pytest.mark.long
def test_postgres_two_workers_run_each_point_exactly_once(tmp_path, repo, postgres):
    made = make(tmp_path, postgres, points=grid({'optim.lr': [0.1, 0.2, 0.3], 'seed': [0, 1]}))
    logs = [tmp_path / f'{i}.txt' for i in (0, 1)]
    workers = [start_worker(repo, tmp_path, log) for log in logs]
    assert [process.wait(timeout=120) for process in workers] == [0, 0]
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    assert Counter(line.split()[0] for line in lines) == {f'{n:04d}': 1 for n in range(1, 7)}
    assert {trial.state for trial in made.trials()} == {TrialState.COMPLETE}
    assert picture.best(made).value == 0.3


@pytest.mark.slow
@pytest.mark.long
def test_postgres_a_trial_of_a_killed_worker_is_taken_up(tmp_path, repo, postgres):
    made = make(tmp_path, postgres, space={'optim.lr': log_uniform(1e-4, 0.1)}, trials=3)
    log = tmp_path / 'log.txt'
    assert start_worker(repo, tmp_path, log, victim='0002').wait(timeout=120) == -9
    states = [row[1] for row in picture.rows(made)]
    assert states == ['complete', 'interrupted']
    assert start_worker(repo, tmp_path, log).wait(timeout=120) == 0
    begun = log.read_text().splitlines()
    assert [line.split()[0] for line in begun] == ['0001', '0002', '0002', '0003']
    assert begun[1] == begun[2]  # with the value that was chosen first
    assert [trial.state for trial in made.trials()] == [TrialState.COMPLETE] * 3
    assert made.trials()[1].intermediate_values == {1: 0.1, 2: 0.2}


@pytest.mark.slow
@pytest.mark.fault(110)
@pytest.mark.parametrize('password', ['', 'somebody'])
def test_a_url_with_its_user_is_found_again(tmp_path, repo, postgres, monkeypatch, password):
    """PGPASSWORD may be the user's name, too, which is then not stored as stars."""
    monkeypatch.setenv(URLS, '')
    monkeypatch.setenv('PGPASSWORD', password)
    url = f'{postgres}?require_auth=none'
    words = [f'{repo}/experiments/sweeps/digits.py:smoke', '--study', 'a', '--storage', url]
    assert main(['sweep', 'create', *words, '--workdir', str(tmp_path)]) == 0
    assert json.loads((tmp_path / study.MARKER).read_text())['storage'] == url
    monkeypatch.setenv(URLS, '')
    assert main(['sweep', 'status', 'a', '--workdir', str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_server_without_the_role_or_database_is_a_mistake(tmp_path, server, capsys):
    for url in (f'{server}/nowhere', f'{server}/postgres'.replace('somebody', 'nobody')):
        words = ['a', '--storage', url, '--workdir', str(tmp_path)]
        assert main(['sweep', 'status', *words]) == 2
        assert 'does not exist' in capsys.readouterr().err


@pytest.mark.fault(139)
def test_a_worker_whose_storage_does_not_answer_may_start_again(tmp_path, free_port, capsys):
    url = f'postgresql+psycopg://me@127.0.0.1:{free_port}/db'
    assert main(['sweep', 'work', 'a', '--storage', url, '--workdir', str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line and 'sqlite' not in line


@pytest.mark.slow
@pytest.mark.fault(142)
@pytest.mark.parametrize('command', [pytest.param('fast', marks=pytest.mark.long), 'immediate'])
def test_a_server_that_restarts_is_waited_for(
    tmp_path, server, postgres, fake_training, monkeypatch, caplog, command
):
    made = make(tmp_path, postgres, points=grid({'seed': [0, 1]}))
    restarted = []

    def at_a_step(config, step):
        if (config.seed, step) in ((0, 2), (1, 3)):  # while it reports, and before it ends
            server.control('-m', command, 'stop')
            threading.Timer(1.0, server.control, ['start']).start()
            restarted.append(step)
        return 0.1 * step

    monkeypatch.setattr(storages, 'PAUSE_SECONDS', 0.1)
    fake_training(at_a_step)
    assert worker.work(made).failures == []
    assert restarted == [2, 3]
    assert {trial.state for trial in made.trials()} == {TrialState.COMPLETE}
    assert made.trials()[0].intermediate_values == {1: 0.1, 2: 0.2, 3: pytest.approx(0.3)}
    assert any('waiting for it' in line for line in caplog.messages)


@pytest.mark.slow
@pytest.mark.fault(142)
def test_a_server_that_stays_away_leaves_the_trial_to_others(
    tmp_path, server, postgres, fake_training, monkeypatch, capsys
):
    made = make(tmp_path, postgres, points=grid({'seed': [0]}))
    monkeypatch.setattr(storages, 'PATIENCE_SECONDS', 0.3)

    def away(config, step):
        server.control('-m', 'fast', 'stop')
        return 0.5

    fake_training(away)
    try:
        assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 1
    finally:
        server.control('start')
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith('error: ')]
    assert 'has not answered' in line
    assert picture.counts(made) | {'interrupted': 1, 'fail': 0} == picture.counts(made)
    fake_training(lambda config, step: 0.5)
    assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 0
    assert picture.counts(made)['complete'] == 1


@pytest.mark.slow
@pytest.mark.fault(142)
@pytest.mark.parametrize('version', ['v2.6.0.a', 'unknown'])
def test_a_database_of_another_version_of_optuna_is_one_line(tmp_path, capsys, version):
    made = make(tmp_path, 'sqlite', points=grid({'seed': [0]}))
    assert made
    with contextlib.closing(sqlite3.connect(tmp_path / 'sweep.db')) as db:
        db.execute(f"UPDATE alembic_version SET version_num = '{version}'")
        db.commit()
    for action in ('status', 'work'):
        assert main(['sweep', action, 'name', '--workdir', str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert 'sweep.db' in line and 'Optuna' in line


@pytest.mark.parametrize('error', [optuna.exceptions.StorageInternalError('x'), OSError(28, 'No')])
def test_a_storage_that_fails_once_fails_no_trial(tmp_path, monkeypatch, fake_training, error):
    made = make(tmp_path, points=grid({'seed': [0]}))
    report = optuna.Trial.report
    fake_training(lambda config, step: 0.5)

    def fail(*_):
        raise error

    monkeypatch.setattr(optuna.Trial, 'report', fail)
    with pytest.raises(UserError, match='the study'):
        worker.work(made)
    assert picture.counts(made) | {'interrupted': 1, 'fail': 0} == picture.counts(made)
    monkeypatch.setattr(optuna.Trial, 'report', report)
    assert worker.work(made).finished == 1


# --- a journal ---


def add_note(made, text):
    made.storage.set_study_user_attr(ids(made, 0)[0], 'note', text)


@pytest.mark.slow
@pytest.mark.fault(143)
def test_a_write_to_a_full_disk_leaves_the_journal_whole(tmp_path):
    with small_disk(tmp_path / 'disk', 2**18) as disk:
        made = make(disk / 'runs', points=grid({'seed': [0, 1]}))
        journal = disk / 'runs' / 'journal.log'
        before = journal.read_bytes()
        (disk / 'ballast').write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
        with pytest.raises(OSError, match='No space'):
            add_note(made, 'x' * 2**14)
        assert journal.read_bytes() == before
        (disk / 'ballast').unlink()
        add_note(made, 'short')
        assert study.open_study('name', folder=disk / 'runs').load(0).user_attrs['note'] == 'short'


@pytest.mark.fault(143)
def test_a_torn_last_line_is_cut_off_and_kept(tmp_path, caplog):
    made = make(tmp_path, points=grid({'seed': [0, 1]}))
    journal = tmp_path / 'journal.log'
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":8,"wor')
    assert len(study.open_study('name', folder=tmp_path).trials()) == 2
    add_note(made, 'later')
    assert journal.read_bytes().startswith(whole)
    assert b'"op_code":8' not in journal.read_bytes()
    assert (tmp_path / 'journal.log.torn').read_bytes() == b'{"op_code":8,"wor\n'
    assert 'torn' in caplog.text
    assert study.open_study('name', folder=tmp_path).load(0).user_attrs['note'] == 'later'


@pytest.mark.fault(143)
def test_a_full_disk_stops_the_worker_and_fails_no_trial(tmp_path, monkeypatch, capsys):
    made = make(tmp_path, points=grid({'seed': [0, 1]}), retries=0)

    def full(*_, **options):
        with paths.writing(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(train, 'train', full)
            assert main(['sweep', 'work', 'name', '--workdir', str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert 'trial 1 is interrupted' in line and 'No space left on device' in line
    tally = picture.counts(made)
    assert (tally['interrupted'], tally['waiting'], tally['fail']) == (1, 1, 0)


def test_a_password_is_not_written_down():
    url = 'postgresql+psycopg://someone:secret@host/sweeps'
    assert study.without_password(url) == 'postgresql+psycopg://someone@host/sweeps'
    url = 'postgresql+psycopg://someone@host/sweeps?password=secret&sslmode=require'
    hidden = 'postgresql+psycopg://someone@host/sweeps?sslmode=require'
    assert study.without_password(url) == hidden


@pytest.mark.fault(110)
@pytest.mark.parametrize(
    'url',
    [
        'postgresql+psycopg://me:SECRET@127.0.0.1:1/db',
        'postgresql+psycopg://me:SE/CRET@127.0.0.1:1/db?password=SECRET',
        'postgres:/x',
        'mysql://u:SECRET@127.0.0.1:port/db',
        'nonsense://u:SECRET@host/db',
    ],
)
@pytest.mark.parametrize('action', ['create', 'status'])
def test_a_password_is_not_printed(tmp_path, repo, capsys, monkeypatch, url, action):
    monkeypatch.setenv(URLS, '')
    words = {
        'create': ['create', f'{repo}/experiments/sweeps/digits.py', '--study', 'a'],
        'status': ['status', 'a'],
    }[action]
    expected = 1 if url.startswith('postgresql') else 2  # nothing answers there
    assert main(['sweep', *words, '--storage', url, '--workdir', str(tmp_path)]) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert any(words in line for words in ('cannot be opened', 'not answer', '--storage needs'))
    assert ':SE' not in line


# --- Optuna's dashboard ---


def answer(url, process, seconds=60):
    """What the server says once it is up, as JSON."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                assert response.status == 200
                return json.load(response)
        except urllib.error.URLError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize('storage', ['journal', pytest.param('sqlite', marks=pytest.mark.long)])
def test_the_dashboard_shows_a_study(tmp_path, free_port, storage):
    pytest.importorskip('optuna_dashboard')
    url = {'journal': '', 'sqlite': f'sqlite:///{tmp_path}/sweep.db'}[storage]
    make(tmp_path, url, points=grid({'seed': [0, 1]}))
    command = pathlib.Path(sys.executable).with_name('optuna-dashboard')
    place = ['--host', '127.0.0.1', '--port', str(free_port), url or tmp_path / 'journal.log']
    with subprocess.Popen([command, *place], stderr=subprocess.DEVNULL) as process:
        try:
            api = f'http://127.0.0.1:{free_port}/api/studies'
            (shown,) = answer(api, process)['study_summaries']
            assert shown['study_name'] == 'name'
            detail = answer(f'{api}/{shown["study_id"]}', process)
            assert [trial['state'] for trial in detail['trials']] == ['Waiting', 'Waiting']
        finally:
            process.kill()
