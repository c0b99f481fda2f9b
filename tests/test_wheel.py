"""The package as a wheel, outside of the repository."""

import os
import subprocess
import sys
import zipfile

import pytest
from helpers.experiments import ROOT

pytestmark = pytest.mark.long


def run(*words, cwd, **env):
    done = subprocess.run(
        [sys.executable, '-m', *words],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git_files(*where):
    found = subprocess.check_output(['git', 'ls-files', *where], cwd=ROOT, text=True)
    return found.splitlines()


@pytest.fixture(scope='module')
def dist(tmp_path_factory):
    """The archive and the wheel that is built of it."""
    pytest.importorskip('build')
    folder = tmp_path_factory.mktemp('dist')
    copy = tmp_path_factory.mktemp('source')
    listed = '\n'.join(git_files('.'))
    pack = ['tar', '-cf', str(copy / 'all.tar'), '-T', '-']
    subprocess.run(pack, cwd=ROOT, input=listed, text=True, check=True)
    subprocess.run(['tar', '-xf', 'all.tar'], cwd=copy, check=True)
    run('build', '--no-isolation', '--outdir', str(folder), '.', cwd=copy)
    return folder


def test_archives_are_what_an_index_accepts(dist):
    pytest.importorskip('twine')
    archives = sorted(file.name for file in dist.iterdir())
    assert [name.partition('-')[0] for name in archives] == ['vit_jax', 'vit_jax']
    assert run('twine', 'check', '--strict', *archives, cwd=dist).count('PASSED') == 2


def test_the_wheel_trains_an_experiment_by_its_name(dist, tmp_path):
    (wheel,) = dist.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / 'site')
    # Every file that the package reads beside its code is in it.
    tracked = git_files('vit_jax', 'experiments')
    expected = {
        name if name.startswith('vit_jax/') else f'vit_jax/{name}'
        for name in tracked
        if not name.endswith('.md') and name != 'vit_jax/experiments'
    }
    inside = {str(p.relative_to(tmp_path / 'site')) for p in (tmp_path / 'site').rglob('*.*')}
    assert expected <= inside
    said = run(
        *('vit_jax', 'train', '--config', 'vit/digits:smoke', '--workdir', str(tmp_path / 'run')),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path / 'site'),
    )
    assert said.startswith('vit: 17,418 parameters')
    assert (tmp_path / 'run' / 'result.json').is_file()
    listed = run('vit_jax', 'list', 'experiments', cwd=tmp_path, PYTHONPATH=str(tmp_path / 'site'))
    assert '\nbit/finetune:' in listed
