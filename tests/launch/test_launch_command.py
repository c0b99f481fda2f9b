"""`launch`: what it prints, what it hands over, and mistakes in one line."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.messages import mentions, says

from vit_jax import __main__ as cli
from vit_jax.commands import rehearse
from vit_jax.errors import UserError
from vit_jax.launch import slurm
from vit_jax.rehearsal import kill_and_resume

GS = '--workdir=gs://a'
REPO = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ['train', '--config', f'{REPO}/experiments/vit/digits.py:smoke', '--workdir', 'runs/a']


def program(folder, name, text):
    """Puts a program on a PATH of its own."""
    path = folder / name
    path.write_text(f'#!/bin/bash\n{text}\n')
    path.chmod(0o755)
    return f'{folder}:/usr/bin:/bin'


def test_slurm_gets_the_script_that_dry_run_prints(tmp_path, monkeypatch, capsys):
    path = program(tmp_path, 'sbatch', f'cat > {tmp_path}/script; echo "41;cluster"')
    monkeypatch.setenv('PATH', path)
    words = ['slurm', '--nodes', '2', '--cpus-per-task', '8', '--sbatch', 'account=a']
    assert cli.main(['launch', *words, '--dry-run', '--', *TRAIN, '--workdir', 'a b']) == 0
    shown = capsys.readouterr().out
    assert "'a b' --distributed" in shown
    assert '#SBATCH --cpus-per-task=8\n' in shown
    assert not (tmp_path / 'script').exists()
    assert cli.main(['launch', *words, '--', *TRAIN, '--workdir', 'a b']) == 0
    assert capsys.readouterr().out == 'submitted job 41\n'
    assert (tmp_path / 'script').read_text() == shown


@pytest.mark.slow
def test_a_job_finds_the_modules_of_its_folder_as_its_user_does(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', program(tmp_path, 'sbatch', f'env > {tmp_path}/env; echo 41'))
    monkeypatch.setenv('PYTHONPATH', str(REPO))
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    words = [sys.executable, '-m', 'vit_jax', 'launch', 'slurm', '--', *TRAIN]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=120)
    found = (tmp_path / 'env').read_text()
    assert f'PYTHONPATH={REPO}\n' in found and 'PYTHONSAFEPATH' not in found


def test_a_job_does_not_inherit_the_allocation_it_is_submitted_from(tmp_path, monkeypatch):
    """A job of two CPUs was bound to the one core of the allocation."""
    monkeypatch.setenv('PATH', program(tmp_path, 'sbatch', f'env > {tmp_path}/env; echo 41'))
    job = {'SLURM_JOB_ID': '7', 'SLURM_CPU_BIND': 'mask_cpu:0x1', 'SLURMD_NODENAME': 'n1'}
    job |= {'SRUN_CPUS_PER_TASK': '1', 'SBATCH_CPU_BIND': 'quiet', 'CUDA_VISIBLE_DEVICES': '3'}
    mpi = {'OMPI_COMM_WORLD_SIZE': '2', 'PMIX_RANK': '1', 'PMI_SIZE': '2', 'PRTE_LAUNCHED': '1'}
    users = {'SLURM_CONF': '/a/slurm.conf', 'SBATCH_ACCOUNT': 'lab', 'OMPI_MCA_btl': 'tcp'}
    for name, value in {**job, **mpi, **users}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(['launch', 'slurm', '--', *TRAIN]) == 0
    inherited = dict(line.split('=', 1) for line in (tmp_path / 'env').read_text().splitlines())
    assert not {*job, *mpi} & inherited.keys()
    assert users.items() <= inherited.items()
    monkeypatch.delenv('SLURM_JOB_ID')
    assert slurm.outside_allocation(os.environ)['CUDA_VISIBLE_DEVICES'] == '3'  # the user's own


def test_skypilot_gets_the_task_that_dry_run_prints(tmp_path, monkeypatch, capsys, repo):
    path = program(tmp_path, 'sky', f'cp "${{@: -1}}" {tmp_path}/task; echo "$@"')
    monkeypatch.setenv('PATH', path)
    monkeypatch.chdir(repo)
    data = ['--mount', '/data=gs://lab-data', '--env', 'TFDS_DATA_DIR=/data/tfds']
    words = ['sky', '--tpu', 'v4-16', '--spot', '--job-name', 'b16', *data]
    command = ['--', *TRAIN, '--workdir', 'gs://bucket/run']
    assert cli.main(['launch', *words, '--dry-run', *command]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)['resources']['use_spot'] is True
    assert yaml.safe_load(shown)['envs']['TFDS_DATA_DIR'] == '/data/tfds'
    assert yaml.safe_load(shown)['file_mounts']['/data']['source'] == 'gs://lab-data'
    assert cli.main(['launch', *words, *command]) == 0
    assert capsys.readouterr().out.startswith('jobs launch --yes --detach-run ')
    assert (tmp_path / 'task').read_text() == shown


@pytest.mark.parametrize('dry', [[], ['--dry-run']])
def test_a_rehearsal_comes_before_a_job(dry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kill_and_resume.DryRun, 'rows', lambda self: iter(()))
    monkeypatch.setenv('PATH', program(tmp_path, 'sbatch', f'touch {tmp_path}/submitted; echo 41'))
    words = ['launch', 'slurm', '--rehearse', *dry, '--', *TRAIN, '--workdir', f'{tmp_path}/run']
    assert cli.main([*words, '--config.data.split', 'trian']) == 1
    shown = capsys.readouterr()
    assert shown.out == '' and not (tmp_path / 'submitted').exists()
    last = shown.err.splitlines()[-1]
    assert mentions(last, 'rehearsal', 'submitted')
    assert "did you mean 'train'" in last

    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert '12 of 1,437 records' in shown.err
    assert shown.out.startswith('#!/bin/bash' if dry else 'submitted job 41')
    assert (tmp_path / 'submitted').exists() == (not dry)
    assert not (tmp_path / 'run.rehearsal').exists()


@pytest.mark.parametrize(
    ('launcher', 'slices'),
    [
        (['sky', '--tpu', 'v5litepod-16'], 'v5litepod-16'),
        (['tpu', '--tpu', 'v4-16', '--slices', '2', '--zone', 'us-a'], '2xv4-16'),
        (['gke', '--tpu', 'v6e-16', '--image', 'image', '--preflight'], 'v6e-16'),
    ],
)
@pytest.mark.parametrize('result', [kill_and_resume.OK, kill_and_resume.FAILED])
def test_a_rehearsal_compiles_for_the_slices(launcher, slices, result, monkeypatch, capsys):
    asked = []

    def rehearsed(config, args):
        asked.append((config.seed, args.workdir))
        return [kill_and_resume.Row('data', kill_and_resume.OK, 0.0, 'read')]

    def compiled(argv, args):
        asked.append((args.config, args.topology))
        return kill_and_resume.Row('preflight', result, 0.0, 'said the compiler')

    monkeypatch.setattr(rehearse, 'rehearse_config', rehearsed)
    monkeypatch.setattr(rehearse, 'preflight', compiled)
    words = [*TRAIN[:3], '--config.seed=5', '--stop-at', '9', GS]
    failed = result == kill_and_resume.FAILED
    assert cli.main(['launch', *launcher, '--rehearse', '--dry-run', '--', *words]) == failed
    assert asked == [(5, 'gs://a'), (TRAIN[2], slices)]
    shown = capsys.readouterr()
    assert bool(shown.out) == (not failed)
    assert (mentions(shown.err, 'submitted', 'preflight')) == failed


def test_what_rehearses_a_command():
    words = ['--config', TRAIN[2], '--config.seed=1', '--workdir', 'a', '--allow', 'my_lab']
    assert rehearse.rehearsal_flags(['train', *words, '--strict', '--stop-at', '3']) == words
    words = ['sweep', 'create', 'a.py:small', '--study', 'a']
    assert rehearse.rehearsal_flags(words) == ['--sweep', 'a.py:small', '--workdir', 'runs/a']
    with pytest.raises(UserError, match='works with `train` and `sweep create`'):
        rehearse.rehearsal_flags(['sweep', 'work', 'a'])


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([], ('slurm', 'sky')),
        (['slrum', '--', *TRAIN], "did you mean 'slurm'"),
        (['slurm'], ('launch', 'command')),
        (['slurm', '--', 'trian'], "did you mean 'train'"),
        (['slurm', '--', 'launch', 'slurm'], "unknown command 'launch'"),
        (['slurm', '--', 'train', '--workdir', 'a'], ('train', 'config')),
        (['slurm', '--', 'train', '--config', 'b.py', '--workdir', 'a'], "no file 'b.py'"),
        (['slurm', '--', *TRAIN, '--config.optim.rl=1'], "did you mean 'lr'"),
        (['slurm', '--', *TRAIN, '--workdri', 'a'], "did you mean '--workdir'"),
        (['slurm', '--', 'benchmark', *TRAIN[1:3], '--config.seeds=1'], "did you mean 'seed'"),
        (['slurm', '--', 'sweep', 'wrok', 'a'], "did you mean 'work'"),
        (['slurm', '--', 'sweep', 'create', 'b.py', '--study', 'b'], "no file 'b.py'"),
        (['slurm', '--nodes', '0', '--', *TRAIN], ('--nodes', '1')),
        (['slurm', '--node', '2', '--', *TRAIN], "did you mean '--nodes'"),
        (['slurm', '--nodes', '2', '--', 'benchmark'], ('benchmark', 'process')),
        (['slurm', '--array', '2', '--', *TRAIN], ('--array', '2 times')),
        (['slurm', '--nodes', '-1', '--', *TRAIN], ('--nodes', '1', '-1')),
        (['slurm', '--gpus', 'x', '--', *TRAIN], ('--gpus', "'x'")),
        (
            ['slurm', '--time', '1:00', '--', *TRAIN],
            '(--time 1:00)',
        ),
        (['slurm', '--grace', '65536', '--', *TRAIN], ('--grace', '65536', '65535')),
        (['slurm', '--sbatch', 'a\nb', '--', *TRAIN], 'one line'),
        (['slurm', '--', *TRAIN], ('sbatch', 'login')),
        (['sky', '--', *TRAIN], '--tpu'),
        (['sky', '--tpu', 'v9-8', '--', *TRAIN, '--workdir=gs://a'], "TPU generation 'v9'"),
        (['sky', '--tpu', 'v4-8', '--', *TRAIN], 'give a bucket'),
        (['sky', '--tpu', '2xv4-8', '--', *TRAIN, GS], '--tpu v4-8 --slices 2'),
        (['sky', '--tpu', 'v4:2x2x32', '--', *TRAIN, GS], 'only launch gke'),
        (['sky', '--tpu', 'v4-7', '--', *TRAIN, GS], ('nearest', 'v4-8')),
        (['sky', '--tpu', 'v4-8', '--env', 'A', '--', *TRAIN, GS], 'not NAME=VALUE'),
        (['sky', '--tpu=v4-8', '--mount', '/a=gs://b/c', '--', *TRAIN, GS], 'bucket'),
        (['sky', '--tpu=v4-8', '--env=TFDS_DATA_DIR=gs://b/t', '--', *TRAIN, GS], 'give --mount'),
        (['sky', '--tpu', 'v4-8', '--', *TRAIN, '--workdir=gs://a'], ('root', 'repository')),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(['launch', *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, message)


# What the client of Slurm refuses, and some that only its controller does.
REFUSED = {
    '--time=': ['abc', '1h', '1.5', '-5', '1:2:3:4', '1-', ' 5', '12:00:00 '],
    '--sbatch=time=': ['abc', ''],
    '--sbatch=mem=': ['abc', '1.5G', '-4', '4P', "'4 G'", '4Mx', ''],
    '--sbatch=mem-per-gpu=': ['abc'],
    '--partition=': ['a b', 'a,', '-a;b'],
    '--sbatch=nodes=': ['0', '-1', 'x'],
    '--sbatch=gpus-per-node=': ['-1', 'x', '1.5', 'gpu:a100:2'],
    '--sbatch=': ['', '-N 2', 'comment=two words', "comment='", '=3'],
    '--job-name=': [' ', 'a/b', 'a' * 300, 'a\nb'],
}


@pytest.mark.parametrize('flag', REFUSED)
def test_values_that_slurm_does_not_take(flag, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', program(tmp_path, 'sbatch', f'touch {tmp_path}/submitted'))
    for value in REFUSED[flag]:
        for dry in ([], ['--dry-run']):
            assert cli.main(['launch', 'slurm', f'{flag}{value}', *dry, '--', *TRAIN]) == 2
            shown = capsys.readouterr()
            (line,) = shown.err.splitlines()
            assert 'launch slurm: ' in line and 'must be ' in line
            assert shown.out == ''
    assert [path.name for path in tmp_path.iterdir()] == ['sbatch']


TAKEN = {
    'time': ['3', '2:30', '1:2:3', '1-2', '1-2:3', '01-02:03:04', '0', 'UNLIMITED', 'infinite'],
    'mem': ['4', '4G', '4g', '4GB', '0', '2T'],
    'mem-per-cpu': ['500M'],
    'nodes': ['2', '1-2'],
    'partition': ['gpu', 'gpu-long,b_2'],
    'comment': ["'two words'"],
}


def test_values_that_slurm_takes(capsys, monkeypatch, tmp_path):
    """By its own client too, where it is installed, which then finds no cluster."""
    conf = 'ClusterName=a\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=9\n'
    conf += 'AuthType=auth/none\nCredType=cred/none\nMessageTimeout=1\nNodeName=a\n'
    (tmp_path / 'slurm.conf').write_text(conf)
    monkeypatch.setenv('SLURM_CONF', str(tmp_path / 'slurm.conf'))
    for option, values in TAKEN.items():
        for value in values:
            given = f'{option}={value}'
            words = [f'--{given}'] if option in ('time', 'partition') else [f'--sbatch={given}']
            assert cli.main(['launch', 'slurm', *words, '--dry-run', '--', *TRAIN]) == 0
            script = capsys.readouterr().out
            assert f'#SBATCH --{given}\n' in script
            if shutil.which('sbatch'):
                done = subprocess.run(
                    ['sbatch', '--test-only'], input=script, capture_output=True, text=True
                )
                assert 'Unable to contact slurm controller' in done.stderr


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['sky', '--tpu', 'v4-8', '--job-name', '../../x', '--', *TRAIN, GS], "'../../x': must be"),
        (['slurm', '--job-name', '../x', '--', *TRAIN], ("'../x'", '200')),
    ],
)
def test_a_job_whose_name_leads_elsewhere(words, message, capsys, monkeypatch, tmp_path):
    for name in ('sbatch', 'sky'):
        monkeypatch.setenv('PATH', program(tmp_path, name, f'touch {tmp_path}/submitted'))
    monkeypatch.chdir(REPO)
    assert cli.main(['launch', *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['sbatch', 'sky']


def names(flag, *values):
    return [(flag, value) for value in values]


@pytest.mark.fault(65)
@pytest.mark.parametrize(
    ('flag', 'value'),
    [
        *names('--env', 'A B=1', 'A;id=1', 'A\nB=1', 'A$(id)=1', '1A=1', 'A-B=1', 'Ä=1', '`id`=1'),
        *names('--mount', '/a;id=gs://b', '/a b=gs://b', '/a\nb=gs://b', '/$A=gs://b'),
        *names('--mount', '/../a=gs://b', '/a/..=gs://b', 'a=gs://b', '/=gs://b'),
        *names('--mount', '/a=gs://b;id', '/a=gs://$(id)', '/a=gs://b c', '/a=gs://b\n'),
        *names('--region', 'us;id', 'us\n', 'us/a', '$A'),
        *names('--zone', 'us-a b', 'us-a\n'),
    ],
)
def test_names_that_a_shell_would_read_otherwise(flag, value, capsys):
    words = ['sky', '--tpu', 'v4-8', f'{flag}={value}', '--dry-run', '--', *TRAIN, GS]
    assert cli.main(['launch', *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert f'launch sky: {flag} ' in line
    assert shown.out == ''


@pytest.mark.parametrize('value', ['a b', "it's $HOME; `id`", 'two\nlines', 'yes', '1', ': {', ''])
def test_every_value_of_a_variable_survives(value, capsys):
    words = ['sky', '--tpu', 'v4-8', f'--env=A_1={value}', '--dry-run', '--', *TRAIN, GS]
    assert cli.main(['launch', *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out)['envs']['A_1'] == value


def test_a_refusal_is_passed_on(tmp_path, monkeypatch, capsys):
    path = program(tmp_path, 'sbatch', 'echo "sbatch: error: invalid partition" >&2; exit 1')
    monkeypatch.setenv('PATH', path)
    assert cli.main(['launch', 'slurm', '--partition', 'x', '--', *TRAIN]) == 2
    assert says(capsys.readouterr().err, 'launch: sbatch refused', 'invalid partition')


@pytest.mark.parametrize('value', ['y', '1e3', '0o17', 'null', '2020-01-01', '1:30', '~', '.5'])
@pytest.mark.parametrize('words', [['sky'], ['gke', '--image', 'image']])
def test_a_value_is_a_string_to_every_parser_of_yaml(words, value, capsys):
    flags = ['--tpu', 'v4-8', f'--env=y={value}', '--dry-run']
    assert cli.main(['launch', *words, *flags, '--', *TRAIN, GS]) == 0
    text = capsys.readouterr().out
    scalars = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    found = [scalar for scalar in scalars if scalar.value in ('y', value)]
    assert len(found) == 2
    assert not any(scalar.plain for scalar in found)
