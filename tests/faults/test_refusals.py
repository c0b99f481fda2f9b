"""What cannot be is refused before anything compiles: one line, exit code 2, no residue."""

import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax.__main__ import main
from vit_jax.runtime import sharding

DIGITS = 'experiments/vit/digits.py:smoke'


@pytest.fixture(autouse=True)
def nothing_compiles(repo, monkeypatch):
    """At the root of the repository, where whoever makes a state fails the test."""
    monkeypatch.chdir(repo)
    monkeypatch.setattr(sharding.Jit, 'create', lambda *_: pytest.fail('a state was made'))


def refusal(words, capsys) -> str:
    """The one line by which a command ends."""
    assert main(list(map(str, words))) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith('error: ')
    return line


def refused_start(tmp_path, capsys, *flags: str) -> str:
    """The line by which `train` ends; nothing is left of it."""
    changed = [f'--config.{flag}' for flag in flags]
    line = refusal(['train', '--config', DIGITS, *changed, '--workdir', tmp_path / 'run'], capsys)
    assert not (tmp_path / 'run').exists()
    return line


REFUSALS = [
    ('modle.name=vit', "unknown key of config 'modle'; did you mean 'model'"),
    ('optim.wieght_decay=1', "did you mean 'weight_decay'"),
    ('optim.lr=nan', 'config.optim.lr=nan: must be a finite number'),
    ('batch_size=0', 'config.batch_size=0: must be at least 1'),
    ('total=-5 steps', "config.total='-5 steps': write"),
    ('seed=-1', 'config.seed=-1: must be 0 or more'),
    ('data.workers=-1', 'workers=-1: must be at least 0'),
    ('data.source=imagnet', "unknown source name 'imagnet' (valid: coco, "),
    ('data.source=tfds:nothing', 'no data set is prepared; looked in'),
    ('model.name=vti', "unknown model name 'vti'; did you mean 'vit'"),
    ('task.name=clasify', "unknown task name 'clasify'; did you mean 'classify'"),
]


@pytest.mark.fault(23, 24, 25)
@pytest.mark.parametrize(('flag', 'said'), REFUSALS)
def test_a_config_that_cannot_be(flag, said, tmp_path, capsys):
    assert said in refused_start(tmp_path, capsys, flag)


@pytest.mark.fault(26, 27)
@pytest.mark.parametrize('patch', [16, 3])
def test_images_that_are_no_whole_patches(patch, tmp_path, capsys):
    line = refused_start(tmp_path, capsys, f'model.patch_size={patch}')
    assert mentions(line, '8 x 8', 'patch_size', patch)


@pytest.mark.fault(27)
def test_images_that_transforms_make_larger_than_whole_patches(tmp_path, capsys):
    flags = 'data.transforms=resize(20)', 'model.patch_size=16'
    assert 'images are 20 x 20' in refused_start(tmp_path, capsys, *flags)


@pytest.mark.fault(28)
def test_fewer_classes_than_the_data_have(tmp_path, capsys):
    line = refused_start(tmp_path, capsys, 'model.num_classes=5')
    assert mentions(line, 'digits', '10 classes')


@pytest.mark.fault(30)
def test_a_batch_that_devices_cannot_share(tmp_path, capsys):
    line = refused_start(tmp_path, capsys, 'batch_size=12')
    assert mentions(line, 'multiple of 8', '8 devices x 1')


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    ('split', 'said'),
    [
        ('train[:5]', 'batch_size=32'),
        ('train[:0]', ('1437', "'train'")),
    ],
)
def test_too_little_data(split, said, tmp_path, capsys):
    assert mentions(refused_start(tmp_path, capsys, f'data.split={split}'), said)


@pytest.mark.fault(32)
def test_a_folder_without_images(tmp_path, capsys):
    (tmp_path / 'empty' / 'cat').mkdir(parents=True)
    line = refused_start(tmp_path, capsys, f'data.source=folder:{tmp_path}/empty')
    assert 'no image' in line


# --- a checkpoint of something else ---


@pytest.fixture
def refused_branch(smoke_run, tmp_path, capsys):
    """`refused_branch(FLAG)`: why a run with another flag cannot begin with that one's state."""

    def start(flag: str) -> str:
        origin = f'branch.from={smoke_run}', 'branch.step=10'
        return refused_start(tmp_path, capsys, flag, *origin)

    return start


@pytest.mark.fault(15)
def test_other_shapes(refused_branch):
    line = refused_branch('model.width=64')
    assert says(line, 'params/encoder/block_0/attention/out/bias', '(32,)', '(64,)')


@pytest.mark.slow
@pytest.mark.fault(16)
def test_missing_and_extra_parameters(refused_branch):
    assert 'params/encoder/block_1/attention/out/bias (32,) is missing' in refused_branch(
        'model.depth=2'
    )
    assert 'ema/encoder/block_0/attention/out/bias (32,) is unknown' in refused_branch(
        'step.ema_decay=0'
    )


@pytest.mark.fault(17)
def test_another_dtype(refused_branch):
    line = refused_branch('optim.mu_dtype=bfloat16')
    assert says(line, 'mu/encoder/block_0/attention/out/bias is float32', 'bfloat16')


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, 'w')


@pytest.mark.fault(37)
@pytest.mark.parametrize('command', ['inspect --checkpoint', 'convert', 'train', 'evaluate'])
def test_pickles_are_never_read(tmp_path, capsys, command):
    file, mark = tmp_path / 'weights.npz', tmp_path / 'unpickled'
    np.savez(file, kernel=np.array([Payload(mark)], dtype=object), bias=np.zeros(3))
    rest = {
        'train': ['--config', DIGITS, f'--config.init.from={file}', '--workdir', tmp_path / 'run'],
        'convert': [file, tmp_path / 'out.npz'],
        'evaluate': ['--checkpoint', file, '--source', 'digits', '--split', 'test'],
    }
    words = [*command.split(), *rest.get(command, [file])]
    assert 'pickled' in refusal(words, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ['weights.npz']
    with np.load(file, allow_pickle=True) as arrays:  # it would have
        assert arrays['kernel'] is not None and mark.exists()
