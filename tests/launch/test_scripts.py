"""The texts that are submitted, and who has to find whom."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from vit_jax import __main__ as cli
from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, command, manifests, slurm
from vit_jax.runtime import processes

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden' / 'launch'
TRAIN = ['train', '--config', 'experiments/vit/imagenet2012.py:B/16', '--workdir']
QUOTED = "--config.data.transforms=resize_small(36)|flip  it's $HOME {x} `id`"
TEXTS = {
    'pod.yaml': lambda: manifests.task_text(
        manifests.SkyJob(
            [*TRAIN, 'gs://lab/b16', QUOTED], 'b16', 'v5litepod-16', extras=['gcs'], spot=True
        )
    ),
    'sweep.yaml': lambda: manifests.task_text(
        manifests.SkyJob(
            ['sweep', 'work', 'a', '--workdir', 'gs://lab/a'],
            'a',
            'v6e-8',
            extras=['gcs', 'sweep'],
            env={'TFDS_DATA_DIR': '/data/tfds', 'PGPASSWORD': 'a: b'},
            mounts={'/data': 'gs://lab-data'},
        )
    ),
    'two_slices.jobset.yaml': lambda: manifests.jobset_text(
        manifests.GkeJob(
            [*TRAIN, 'gs://lab/b16', QUOTED],
            'b16',
            'v6e-16',
            image='lab/image:1',
            slices=2,
            spot=True,
            queue='team',
            namespace='vision',
            account='trainer',
            env={'TFDS_DATA_DIR': '/data/tfds'},
            mounts={'/data': 'gs://lab-data'},
        )
    ),
    'one_slice.jobset.yaml': lambda: manifests.jobset_text(
        manifests.GkeJob(
            *([*TRAIN, 'gs://lab/b16'], 'b16', 'tpu7x-16'), image='lab/image:1', flex_start=True
        )
    ),
    'one_host.yaml': lambda: manifests.task_text(
        manifests.SkyJob(
            *([*TRAIN, 'gs://lab/b16'], 'b16', 'v6e-8'),
            **{'extras': ['gcs'], 'zone': 'us-east5-b', 'restarts': 0},
        )
    ),
}


@pytest.mark.parametrize('name', TEXTS)
def test_scripts_and_manifests_are_the_golden_ones(name):
    found, expected = TEXTS[name](), (GOLDEN / name).read_text()
    if name.endswith('.yaml'):
        found, expected = yaml.safe_load(found), yaml.safe_load(expected)
    assert found == expected


@pytest.mark.parametrize(
    ('fields', 'options'),
    [
        (
            {'nodes': 2, 'gpus': 4, 'partition': 'gpu', 'time': '1-00:00:00', 'cpus': 12},
            '--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --partition=gpu --time=1-00:00:00 '
            '--cpus-per-task=12 --mem-per-cpu=4G --output=%x-%j.out --signal=TERM@120 --requeue',
        ),
        ({'array': 8, 'grace': 60}, '--array=1-8 --output=%x-%A_%a.out --signal=TERM@60 --requeue'),
        ({'options': ['account=vision', '--exclusive']}, '--account=vision --exclusive'),
    ],
)
def test_slurm_is_asked_for_what_the_flags_say(fields, options):
    words = ['sweep', 'work', 'a'] if 'array' in fields else [*TRAIN, 'runs/b16']
    script = slurm.script(slurm.SlurmJob(words, 'b16 again', **fields))
    asked = shlex.split(script.partition('\n\n')[0].replace('#SBATCH', ''), comments=True)
    assert {'--job-name=b16 again', '--open-mode=append', *options.split()} <= set(asked)
    assert ('--distributed' in script) == ('nodes' in fields)


def test_memory_and_cores_are_asked_for_once():
    job = slurm.SlurmJob([*TRAIN, 'a'], 'a', options=['mem=0', '--cpus-per-gpu=8'])
    assert re.findall('(?:mem|cpus)[a-z-]*', slurm.script(job).partition('\n\n')[0]) == [
        'mem',
        'cpus-per-gpu',
    ]


def test_every_word_of_the_command_survives_the_shell():
    words = [*TRAIN, 'runs/b16', QUOTED, 'two\nlines', '']
    script = slurm.script(slurm.SlurmJob(words, 'a'))
    heard = script.replace('srun --kill-on-bad-exit=0 python', "printf '%s\\0'")
    printed = subprocess.run(['bash', '-c', heard], capture_output=True, text=True, check=True)
    assert printed.stdout.split('\0')[:-1] == ['-m', 'vit_jax', *words]
    run = yaml.safe_load(
        manifests.task_text(manifests.SkyJob([*TRAIN, 'gs://b/r', QUOTED], 'a', 'v4-8'))
    )['run']
    assert shlex.split(run)[3:] == [*TRAIN, 'gs://b/r', QUOTED]


@pytest.mark.parametrize(
    ('srun', 'stopped', 'restarted', 'requeues'),
    [
        (0, False, 0, False),
        (2, False, 0, False),  # a mistake of the user's
        (3, False, 0, False),  # diverged
        (EXIT_PREEMPTED, False, 0, True),
        (EXIT_PREEMPTED, False, 99, True),
        (EXIT_PREEMPTED, True, 0, False),  # scancel
        (137, False, 0, True),
        (137, False, 99, True),  # those at the time limit do not count
    ],
)
def test_how_a_job_ends_decides_whether_it_is_queued_again(
    tmp_path, srun, stopped, restarted, requeues
):
    restarts = {'SLURM_RESTART_COUNT': str(restarted)} if restarted else {}
    code, asked = run_script(tmp_path, srun, stopped, SLURM_JOB_ID='7', **restarts)
    assert code == srun
    assert asked == ('requeue 7\n' if requeues else '')


def run_script(folder, srun, stopped=False, **environ):
    """Exit code, and what scontrol was asked for, when the processes end with `srun`."""
    programs = {
        'srun': f'{"kill -TERM $PPID;" if stopped else ""} exit {srun}',
        'scontrol': f'echo "$@" > {folder}/requeued',
    }
    for name, text in programs.items():
        (folder / name).write_text(f'#!/bin/bash\n{text}\n')
        (folder / name).chmod(0o755)
    (folder / 'requeued').unlink(missing_ok=True)
    script = slurm.script(slurm.SlurmJob(['train'], 'a', restarts=2))
    environ['PATH'] = f'{folder}:/usr/bin:/bin'
    done = subprocess.run(['bash', '-c', script], env=environ, cwd=folder, check=False)
    asked = folder / 'requeued'
    return done.returncode, asked.read_text() if asked.exists() else ''


def test_only_failures_count_as_restarts(tmp_path):
    ends = [137, EXIT_PREEMPTED, 1, EXIT_PREEMPTED, 137]
    asked = [run_script(tmp_path, code, SLURM_JOB_ID='7')[1] != '' for code in ends]
    assert asked == [True, True, True, True, False]
    assert not list(tmp_path.glob('.vit-jax*'))


@pytest.mark.parametrize('cpus', ['', '12'])
def test_srun_gets_the_cores_of_the_job(tmp_path, cpus):
    script = slurm.script(slurm.SlurmJob(['train'], 'a'))
    shown = script.replace('srun --kill-on-bad-exit=0', 'env; exit 0 #')
    environ = {'PATH': '/usr/bin:/bin', **({'SLURM_CPUS_PER_TASK': cpus} if cpus else {})}
    done = subprocess.run(
        ['bash', '-c', shown], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (f'SRUN_CPUS_PER_TASK={cpus}\n' in done.stdout) == bool(cpus)


def test_a_job_of_an_array_queues_itself_again_and_no_other(tmp_path):
    array = {'SLURM_ARRAY_JOB_ID': '3', 'SLURM_ARRAY_TASK_ID': '2'}
    _, asked = run_script(tmp_path, EXIT_PREEMPTED, SLURM_JOB_ID='3', **array)
    assert asked == 'requeue 3_2\n'


@pytest.mark.parametrize(
    ('tpu', 'hosts'),
    [
        ('v2-8', 1),
        ('v3-32', 4),
        ('v4-8', 1),
        ('v4-16', 2),
        ('v5litepod-1', 1),
        ('v5litepod-8', 1),
        ('v5litepod-16', 4),
        ('v5p-8', 1),
        ('v5p-128', 16),
        ('v6e-8', 1),
        ('tpu-v6e-256', 64),
    ],
)
def test_number_of_machines_of_a_slice(tpu, hosts):
    assert cloud_tpu.hosts(tpu) == hosts
    words = manifests.task(manifests.SkyJob(['train', '--workdir', 'gs://b/r'], 'a', tpu))[
        'run'
    ].split()
    assert ('--distributed' in words) == (hosts > 1)


@pytest.mark.parametrize(
    'tpu', ['v5litpod-8', 'v4', 'v4-0', 'v4-x', 'v4-7', 'v4-12', 'v6e-2', 'v2-64']
)
def test_no_such_tpu(tpu):
    with pytest.raises(UserError, match='--tpu'):
        cloud_tpu.hosts(tpu)


@pytest.mark.parametrize(
    'words',
    [
        ['train', '--workdir', 'runs/a'],
        ['train', '--workdir=runs/a'],
        ['train', '--workdir'],
        ['train', '--config', 'a.py'],
        ['sweep', 'work', 'a'],
        ['evaluate', '--workdir', '/runs/a'],
    ],
)
def test_what_would_be_lost_with_the_machine_is_refused(words):
    with pytest.raises(UserError, match='give a bucket'):
        command.require_bucket('sky', words)


@pytest.mark.parametrize(
    'words', [['train', '--workdir=s3://b/r'], ['benchmark', '--config', 'a.py']]
)
def test_what_outlives_the_machine_is_not_refused(words):
    command.require_bucket('sky', words)


def test_processes_that_cannot_share_a_command():
    with pytest.raises(UserError, match=r'evaluate.*process'):
        slurm.script(slurm.SlurmJob(['evaluate', '--workdir', 'a'], 'a', nodes=2))
    with pytest.raises(UserError, match='--array'):
        slurm.script(slurm.SlurmJob(['train'], 'a', array=2))
    assert command.for_processes(['train', '--distributed'], 2) == ['train', '--distributed']


def test_skypilot_accepts_the_tasks():
    task = pytest.importorskip('sky').Task
    for name in ('pod.yaml', 'one_host.yaml', 'sweep.yaml'):
        (resources,) = task.from_yaml_config(yaml.safe_load((GOLDEN / name).read_text())).resources
        assert resources.job_recovery['recover_on_exit_codes'] == [EXIT_PREEMPTED]


STEP = {'SLURM_STEP_NODELIST': 'node[1-2]', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'}
MPI = {'OMPI_MCA_orte_hnp_uri': '1.0;tcp://10.0.0.1:1'}


@pytest.mark.parametrize(
    ('environ', 'tpu', 'count'),
    [
        ({}, False, 1),
        ({'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4'}, False, 1),  # sbatch without srun
        ({**STEP, 'SLURM_NTASKS': '1'}, False, 1),
        ({**STEP, 'SLURM_NTASKS': '8'}, False, 8),
        ({**MPI, 'OMPI_COMM_WORLD_SIZE': '2'}, False, 2),
        ({'OMPI_COMM_WORLD_SIZE': '1', 'PMI_SIZE': '1'}, False, 1),
        ({**STEP, 'SLURM_NTASKS': '8', 'PMI_SIZE': '8'}, False, 8),  # srun --mpi=pmi2
        ({'TPU_WORKER_HOSTNAMES': 'a,b'}, False, 1),
        ({'TPU_WORKER_HOSTNAMES': 'localhost'}, True, 1),
        ({'TPU_WORKER_HOSTNAMES': 'a,b'}, True, 2),
        ({'TPU_PROCESS_ADDRESSES': 'a:1,b:1', 'MEGASCALE_NUM_SLICES': '3'}, True, 6),
        ({}, True, None),
    ],
)
def test_launchers_tell_how_many_processes_there_are(monkeypatch, environ, tpu, count):
    monkeypatch.setattr(processes, 'on_tpu_vm', lambda: tpu)
    assert processes.count_launched(environ) == count


@pytest.mark.parametrize(
    ('environ', 'tpu', 'joins'),
    [
        ({**STEP, 'SLURM_NTASKS': '1'}, False, False),
        ({**STEP, 'SLURM_NTASKS': '2'}, False, True),
        ({}, False, False),
        ({}, True, True),
    ],
)
def test_only_several_processes_join(monkeypatch, environ, tpu, joins):
    calls = []
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, 'on_tpu_vm', lambda: tpu)
    monkeypatch.setattr(processes.jax.distributed, 'initialize', lambda *a, **k: calls.append(k))
    processes.join_cluster(heartbeat_seconds=7)
    assert [call['heartbeat_timeout_seconds'] for call in calls] == [7] * joins


@pytest.mark.slow
def test_vfio_devices_of_another_kind_are_no_cluster(repo):
    # A process of its own: this one has made arrays, after which nobody can join others.
    code = """
from vit_jax.runtime import processes
processes.on_tpu_vm = lambda: True
processes.join_cluster()
assert not processes.jax.distributed.is_initialized()
"""
    subprocess.run([sys.executable, '-c', code], cwd=repo, check=True, timeout=120)


MPI_5 = {
    'OMPI_COMM_WORLD_SIZE': '2',
    'OMPI_COMM_WORLD_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
}
MPICH = {'PMI_SIZE': '2', 'PMI_RANK': '1'}


@pytest.mark.parametrize('environ', [MPI_5, {**STEP, 'SLURM_NTASKS': '1', **MPI_5}, MPICH])
def test_mpi_that_does_not_tell_where_process_0_is_is_named(repo, monkeypatch, capsys, environ):
    """Process 0 trained alone, and the others found the folder in use."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = f'{repo}/experiments/vit/digits.py:smoke'
    assert cli.main(['train', '--config', config, '--workdir', '/nowhere']) == 2
    said = capsys.readouterr().err
    assert '--coordinator' in said and '_SIZE=2' in said


@pytest.mark.parametrize(
    ('environ', 'expected'),
    [
        (MPI_5, ('a:1', 2, 1, [1])),
        (MPICH, ('a:1', 2, 1, None)),
        ({**MPI, **MPI_5}, ('a:1', None, None, None)),  # JAX has them
        ({}, ('a:1', None, None, None)),
    ],
)
def test_processes_of_mpi_join_at_the_coordinator(monkeypatch, environ, expected):
    joined = []

    def join(address, count, number, local_device_ids=None, **_):
        joined.append((address, count, number, local_device_ids))

    monkeypatch.setattr('jax.distributed.initialize', join)
    for name in {*MPI_5, *MPICH, *MPI}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    processes.initialize('a:1')
    assert joined == [expected]
