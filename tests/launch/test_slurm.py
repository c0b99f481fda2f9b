"""A real Slurm of two nodes on this machine: what `launch slurm` submits trains, stops, goes on."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from helpers.xla import xla_flags

from vit_jax.checkpoints.checkpointer import load_variables
from vit_jax.runtime import processes
from vit_jax.storage import run_folder
from vit_jax.tree_paths import param_paths

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol')
TESTS = str(pathlib.Path(__file__).parents[1])  # where the helpers are
SBIN = '/usr/sbin:/sbin'
# The processes look for the first of them on the node of this name, so it is the machine's own.
HOST = socket.gethostname().split('.')[0]
NODES = (HOST, f'{HOST}-2')
# Nodes have the cores and the memory that a process asks for, whatever this machine has.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
NodeName={nodes[0]} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=16384
NodeName={nodes[1]} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=16384
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A cluster that runs.

    Attributes:
      folder: of its files, and of the output of its jobs.
      environ: what its programs need.
    """

    folder: pathlib.Path
    environ: dict[str, str]

    def launch(self, repo: pathlib.Path, *words: object) -> str:
        """Submits by `launch slurm`; returns the number of the job."""
        output = f'--sbatch=output={self.folder}/%A_%a.out'
        command = [sys.executable, '-m', 'vit_jax', 'launch', 'slurm', output, *map(str, words)]
        done = subprocess.run(
            command, cwd=repo, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return re.fullmatch(r'submitted job (\d+)\n', done.stdout)[1]

    def run(self, *words: str) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self, job: str) -> set[str]:
        """Of the job, or of the jobs of an array."""
        return set(re.findall(r'JobState=(\w+)', self.run('scontrol', 'show', 'job', job)))

    def output(self, job: str) -> str:
        """All that the job has printed, in every one of its starts."""
        return '\n'.join(path.read_text() for path in sorted(self.folder.glob(f'{job}_*.out')))

    def wait_for(self, job: str, *states: str, timeout: float = 150) -> None:
        """Returns when all jobs of the array are in one of the states."""
        self.wait(job, lambda: self.states(job) <= set(states), timeout)

    def wait(self, job: str, condition, timeout: float = 150) -> None:
        """Returns when the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (self.states(job), self.output(job))
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(('127.0.0.1', 0))
        return [probe.getsockname()[1] for probe in probes]


def end(daemons: list[subprocess.Popen]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@pytest.fixture(scope='module')
def cluster():
    """Starts a Slurm of this test's own, and ends it with all its jobs."""
    path = f'{os.environ["PATH"]}:{SBIN}'
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
        pytest.skip(f'no {missing[0]}: apt-get install slurm-wlm munge')
    if os.geteuid():
        pytest.skip('Slurm can only be started by root')
    folder = pathlib.Path(tempfile.mkdtemp(prefix='slurm'))
    folder.chmod(0o755)  # munged wants its socket to be reachable
    environ = {
        **os.environ,
        'PATH': path,
        'SLURM_CONF': f'{folder}/slurm.conf',
        'PYTHONPATH': os.pathsep.join([*filter(None, [os.environ.get('PYTHONPATH')]), TESTS]),
        'XLA_FLAGS': xla_flags(devices=1),
    }
    slurm, daemons = Slurm(folder, environ), []
    try:
        start(slurm, daemons)
        yield slurm
        subprocess.run(
            ['scancel', '--full', '--signal=KILL', '-u', 'root'], env=environ, check=False
        )
        time.sleep(1)
    finally:
        end(daemons)
        shutil.rmtree(folder, ignore_errors=True)


def start(slurm: Slurm, daemons: list[subprocess.Popen]) -> None:
    """Starts the daemons and waits for both nodes."""
    folder = slurm.folder
    (folder / 'munge.key').write_bytes(os.urandom(128))
    (folder / 'munge.key').chmod(0o600)
    text = CONFIG.format(host=HOST, folder=folder, ports=free_ports(3), nodes=NODES)
    (folder / 'slurm.conf').write_text(text)
    names = {'socket': 'socket', 'key-file': 'key', 'pid-file': 'pid'}
    files = [f'--{flag}={folder}/munge.{name}' for flag, name in names.items()]
    more = [f'--log-file={folder}/munge.log', f'--seed-file={folder}/munge.seed']
    commands = [
        ['munged', '--foreground', '--force', *files, *more],
        ['slurmctld', '-D', '-c'],
        *(['slurmd', '-D', '-N', node] for node in NODES),
    ]
    for number, command in enumerate(commands):
        with (folder / f'daemon{number}.log').open('w') as log:
            daemons.append(subprocess.Popen(command, env=slurm.environ, stdout=log, stderr=log))
        if command[0] == 'munged':
            wait_for_file(folder / 'munge.socket')
    deadline = time.monotonic() + 30
    while not idle(slurm):
        logs = '\n'.join(path.read_text() for path in sorted(folder.glob('daemon*.log')))
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)


def wait_for_file(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def idle(slurm: Slurm) -> bool:
    """Whether both nodes wait for jobs."""
    shown = subprocess.run(
        ['sinfo', '-h', '-N', '-o', '%T'], env=slurm.environ, capture_output=True, text=True
    )
    return shown.stdout.split() == ['idle', 'idle']


TRAINING = """
from helpers import linear

def get_config(arg=None):
    config = linear.get_config()
    config.optim = dict(name='sgd', lr=0.5, momentum=0.9, schedule=dict(name='cosine'))
    config.total = arg
    config.every = dict(log='4', eval='20', checkpoint='8')
    config.model.dropout = config.step.ema_decay = 0.0
    return config
"""


@pytest.fixture
def training(tmp_path):
    """`training(steps, folder)`: the words of a command that trains."""
    config = tmp_path / 'config.py'
    config.write_text(TRAINING)
    return lambda steps, folder: ['train', '--config', f'{config}:{steps}', '--workdir', folder]


def steps(folder: pathlib.Path) -> list[int]:
    path = folder / 'metrics.jsonl'
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)['step'] for line in lines if line.endswith('\n')]


@pytest.mark.long
def test_two_nodes_train_like_one_process(cluster, repo, training, tmp_path, run_cli):
    job = cluster.launch(repo, '--nodes', 2, '--', *training(20, tmp_path / 'two'))
    cluster.wait_for(job, 'COMPLETED', 'FAILED')
    assert cluster.states(job) == {'COMPLETED'}, cluster.output(job)
    assert '32 images on 2 x cpu' in cluster.output(job)

    alone = run_cli(*training(20, tmp_path / 'one'))
    assert alone.returncode == 0, alone.stderr
    step, ours, _ = load_variables(tmp_path / 'two' / 'checkpoints')
    expected_step, theirs, _ = load_variables(tmp_path / 'one' / 'checkpoints')
    assert step == expected_step == 20
    theirs = param_paths(theirs)
    for path, value in param_paths(ours).items():
        np.testing.assert_allclose(value, theirs[path], rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize('nodes', [1, 2])
def test_a_job_told_to_stop_is_queued_again_and_continues(cluster, repo, training, tmp_path, nodes):
    folder = tmp_path / 'run'
    job = cluster.launch(
        repo, '--nodes', nodes, '--time', 10, '--restarts', 0, '--', *training(10**6, folder)
    )
    cluster.wait(job, lambda: len(steps(folder)) >= 3)
    cluster.run('scancel', '--signal=TERM', job)  # as Slurm does before a time limit
    cluster.wait(job, lambda: 'stopped after step' in cluster.output(job))
    stopped = int(re.search(r'stopped after step (\d+)/', cluster.output(job))[1])
    cluster.wait(job, lambda: max(steps(folder)) > stopped + 3)
    assert f'resumes after step {stopped}' in cluster.output(job)
    assert cluster.output(job).count(f'32 images on {nodes} x cpu') == 2
    assert 'Restarts=1' in cluster.run('scontrol', 'show', 'job', job)

    cluster.run('scancel', job)
    cluster.wait_for(job, 'CANCELLED')
    cluster.wait(job, lambda: idle(cluster))  # whoever would queue it again has ended
    assert cluster.states(job) == {'CANCELLED'}, cluster.output(job)


@pytest.mark.long
def test_a_trial_of_a_killed_worker_of_an_array_is_continued(
    cluster, repo, training, tmp_path, monkeypatch
):
    pytest.importorskip('optuna')
    from optuna.trial import TrialState

    from vit_jax.sweeps import study
    from vit_jax.sweeps.space import Sweep, grid

    monkeypatch.chdir(repo)
    config = training(60, '')[2]
    sweep = Sweep(config, 'test/accuracy', points=grid({'optim.lr': [0.1, 0.2]}))
    made = study.create(sweep, 'array', folder=tmp_path / 'study')
    job = cluster.launch(
        repo,
        '--array',
        2,
        '--',
        *('sweep', 'work', 'array', '--workdir', made.folder, '--allow', 'helpers'),
    )
    cluster.wait(job, lambda: bool(run_folder.steps(made.run_folder(0))))
    owner = json.loads((made.folder / 'claims' / '0' / 'lock').read_text())
    os.kill(owner['pid'], signal.SIGKILL)
    cluster.wait_for(job, 'COMPLETED', 'FAILED')
    assert cluster.states(job) == {'COMPLETED'}, cluster.output(job)
    errors = [trial.user_attrs.get('error') for trial in made.trials()]
    assert {trial.state for trial in made.trials()} == {TrialState.COMPLETE}, errors
    assert len(made.trials()) == 2
    assert re.search(r'trial 1 of 2: .*\n(.*\n)*?.*resumes after step', cluster.output(job))


def test_one_task_of_slurm_is_no_cluster(cluster, repo):
    code = 'from os import environ; from vit_jax.runtime import processes as p; '
    code += 'print(p.count_launched(environ))'
    words = [sys.executable, '-c', code]
    shown = [
        subprocess.run(
            ['srun', f'-N{nodes}', *words],
            cwd=repo,
            env=cluster.environ,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.split()
        for nodes in (1, 2)
    ]
    assert shown == [['1'], ['2', '2']]
    assert processes.count_launched(os.environ) == 1
