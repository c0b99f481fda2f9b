"""What needs an extra says so where it is not installed, too."""

import pathlib
import re
import sys
import tomllib

import pytest
import yaml
from helpers.messages import says

from vit_jax import extras
from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.rehearsal import rehearsal

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIGITS = f'{ROOT}/experiments/vit/digits.py:smoke'
SKY = ['launch', 'sky', '--tpu', 'v4-8', '--dry-run', '--']


def test_every_extra_is_one_of_the_package_and_installs_what_is_imported():
    known = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    for extra, package in extras.PACKAGES.items():
        assert any(name.replace('-', '_').startswith(package) for name in known[extra])
    assert (
        {*extras.SCHEMES.values(), *extras.NAMED_BY_CONFIGS}
        <= extras.PACKAGES.keys()
        <= known.keys()
    )


def test_every_dependency_stands_once():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    for listed in (project['dependencies'], *project['optional-dependencies'].values()):
        names = [re.split(r'[^\w-]', entry)[0].replace('-', '_') for entry in listed]
        assert len(set(names)) == len(names)


@pytest.fixture
def bare(monkeypatch):
    """A machine on which none of them is installed."""
    for package in extras.PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ('config', 'overrides', 'needed'),
    [
        ('vit/digits.py:smoke', [], set()),
        ('detr/coco.py:smoke', [], {'detection'}),
        ('vit/digits.py:smoke', ['writers=("wandb","tensorboard")'], {'wandb'}),
        ('vit/digits.py:smoke', ['writers=("mlflow",)', 'init.from=gs://a/b'], {'mlflow', 'gcs'}),
        ('vit/digits.py:smoke', ['branch.from=s3://a/b', 'branch.step=1'], {'s3'}),
        ('translate/synthetic.py:smoke', ['evals.test.evaluator=bleu'], {'translate'}),
    ],
)
def test_extras_of_a_config(bare, config, overrides, needed):
    loaded = load.load(f'{ROOT}/experiments/{config}', overrides)
    assert rehearsal.needed_extras(load.to_run(loaded)) == needed


@pytest.mark.parametrize(
    ('words', 'installed'),
    [
        (['train', '--config', DIGITS, '--workdir=gs://a/b'], 'tpu,gcs'),
        (
            ['train', '--config', DIGITS, '--workdir=s3://a/b', '--config.writers=("wandb",)'],
            'tpu,s3,wandb',
        ),
        (['benchmark', '--config', DIGITS], 'tpu'),
        (['evaluate', '--workdir=gs://a/b'], 'tpu,detection,gcs,mlflow,trackio,translate,wandb'),
        (
            ['sweep', 'work', 'a', '--workdir', 'gs://a/b'],
            'tpu,detection,gcs,mlflow,postgres,sweep,trackio,translate,wandb',
        ),
    ],
)
def test_a_rented_machine_gets_what_the_command_needs(words, installed, capsys):
    assert main([*SKY, *words]) == 0
    assert f"-e '.[{installed}]'" in yaml.safe_load(capsys.readouterr().out)['setup']


def test_no_job_is_queued_for_what_is_not_installed(bare, capsys):
    words = ['train', '--config', DIGITS, '--workdir=runs/a', '--config.writers=("wandb",)']
    assert main(['launch', 'slurm', '--dry-run', '--', *words]) == 2
    shown = capsys.readouterr()
    assert says(shown.err, 'launch slurm', "pip install -e '.[wandb]'")
    assert shown.out == ''


def test_no_text_installs_extras_of_a_package_that_no_index_has():
    root = pathlib.Path(__file__).parents[1]
    folders = [root / name for name in ('vit_jax', 'docs', 'experiments')]
    texts = [*root.glob('*.md'), *(p for f in folders for p in f.rglob('*.[pm][yd]'))]
    found = [str(path) for path in texts if "install 'vit_jax[" in path.read_text()]
    assert found == []


def test_costly_variants_leave_others_to_make_test(request, repo):
    run = {item.nodeid.partition('[')[0] for item in request.session.items}
    if len(run) < 1000:
        pytest.skip('only a run of the whole suite has all variants')
    variants = (repo / 'tests' / 'long_variants.txt').read_text().splitlines()
    assert [name for name in variants if name.partition('[')[0] not in run] == []
