"""A model is evaluated on the classes that it has learned, by their number and their names."""

import dataclasses
import io
import itertools
import json
import pathlib
import tarfile

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from PIL import Image

from vit_jax import interop
from vit_jax.__main__ import main
from vit_jax.config import load as config_lib
from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset
from vit_jax.data.records import SourceInfo
from vit_jax.errors import EXIT_PREEMPTED, UserError
from vit_jax.inference import fine_tune, load
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import vit
from vit_jax.trainer import build, compatibility, start

DIGITS = 'tests/helpers/linear.py'
IMAGES = (
    np.random.default_rng(1).integers(0, 256, (24, 1, 1, 3), np.uint8).repeat(8, 1).repeat(8, 2)
)

pytestmark = [pytest.mark.fault(134), pytest.mark.usefixtures('one_device')]


@pytest.fixture
def folder(tmp_path):
    """`folder('cat', 'dog')`: a source with eight gray images of each class."""
    numbers = itertools.count()

    def write(*names):
        root = tmp_path / f'images{next(numbers)}'
        for name, i in itertools.product(names, range(8)):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), i, np.uint8)).save(root / name / f'{i}.png')
        return f'folder:{root}'

    return write


def refused(capsys, *words):
    """The one line of a command that was refused."""
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


def training(repo, workdir, train, test):
    flags = [f'--config.data.source={train}', f'--config.evals.test.source={test}']
    split = ['--config.evals.test.split=train', '--config.batch_size=16']
    return ['train', '--config', repo / DIGITS, '--workdir', workdir, *flags, *split]


def opened(repo, train, test):
    """The data of the evaluation of a run on `train`."""
    flags = [f'data.source={train}', f'evals.test.source={test}', 'evals.test.split=train']
    config = config_lib.load(str(repo / DIGITS), [*flags, 'batch_size=16'])
    return build.build(config, jax.devices()[:1]).evaluations['test'].data


def test_data_without_classes_are_refused_before_training(repo, tmp_path, capsys):
    for name, i in itertools.product(('train/rose', 'train/tulip', 'val/images'), range(8)):
        (tmp_path / 'data' / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / 'data' / name / f'{i}.png')
    source = f'folder:{tmp_path}/data'
    flags = training(repo, tmp_path / 'run', source, source)
    error = refused(capsys, *flags, '--config.evals.test.split=val')
    assert mentions(error, 'config.evals.test', source, 'val', 'classes')


def test_another_number_of_classes_is_refused_before_training(repo, folder, tmp_path, capsys):
    words = training(repo, tmp_path / 'run', folder('rose', 'tulip'), 'digits')
    error = refused(capsys, *words)
    assert mentions(error, 'config.evals.test', '10 classes')
    assert 'the model has 2 (rose, tulip)' in error
    assert not (tmp_path / 'run' / 'config.json').exists()


def test_a_number_more_is_refused_before_training(repo, tmp_path, capsys):
    sources = [tar_of(tmp_path / f'{n}', (), [*range(n)] * 8) for n in (2, 3)]
    error = refused(capsys, *training(repo, tmp_path / 'run', *sources))
    assert mentions(error, '3 classes', '2')
    assert not (tmp_path / 'run').exists()


def test_other_names_are_refused_before_training(repo, folder, tmp_path, capsys):
    words = training(repo, tmp_path / 'run', folder('cat', 'dog'), folder('cat', 'emu'))
    assert mentions(refused(capsys, *words), 'emu, cat', 'dog, cat')
    assert not (tmp_path / 'run' / 'config.json').exists()


def test_a_run_is_not_evaluated_on_other_classes(smoke_run, folder, capsys):
    words = ['evaluate', '--workdir', smoke_run]
    other = ['--source', folder('rose', 'tulip'), '--split', 'train']
    assert mentions(refused(capsys, *words, *other), 'rose, tulip', '10')
    assert 'has 3 classes (7, 8, 9)' in refused(capsys, *words, '--classes', '7,8,9')


@pytest.mark.slow
def test_an_evaluator_that_learns_takes_any_classes(smoke_run, capsys):
    words = ['--evaluator', 'knn(k=3)', '--fit', 'train[:100]', '--classes', '7,8,9']
    assert main(['evaluate', '--workdir', str(smoke_run), *words]) == 0
    assert 'knn_accuracy' in capsys.readouterr().out


def test_classes_that_have_only_numbers_may_have_names_elsewhere(repo, folder):
    test = opened(repo, folder('0', '1'), folder('cat', 'dog'))
    assert test.info.class_names == ('cat', 'dog')


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_classes(tmp_path, folder, repo, capsys):
    images = folder('cat', 'dog')
    words = training(repo, tmp_path / 'run', images, images)
    assert main([*map(str, words), '--stop-at', '1']) == EXIT_PREEMPTED
    root = pathlib.Path(images.removeprefix('folder:'))
    (root / 'dog').rename(root / 'emu')
    assert mentions(refused(capsys, *words), '1', "'emu'", "'dog'")


def tar_of(root, names, labels):
    """A source of gray images with these classes in this order, which may have no names."""
    root.mkdir()
    if names:
        (root / 'classnames.txt').write_text('\n'.join(names))
    with tarfile.open(root / 'train-0.tar', 'w') as tar:
        for i, label in enumerate(labels):
            image = io.BytesIO()
            Image.fromarray(np.full((8, 8), i, np.uint8)).save(image, 'PNG')
            for name, data in ((f'{i:03}.png', image.getvalue()), (f'{i:03}.cls', b'%d' % label)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return f'tar:{root}'


def test_the_same_names_in_another_order_are_renumbered(repo, folder, tmp_path, caplog):
    images, other = folder('cat', 'dog'), tar_of(tmp_path / 'tar', ('dog', 'cat'), [0, 0, 1])
    test = opened(repo, images, other).source
    assert test.info.class_names == ('cat', 'dog')
    assert test.labels().tolist() == [test[i]['label'] for i in range(3)] == [1, 1, 0]
    assert mentions(caplog.text, '2 classes', 'matched')


def test_a_part_of_the_classes_keeps_their_numbers(repo, folder, caplog):
    test = opened(repo, folder('cat', 'dog', 'emu'), folder('emu', 'dog')).source
    assert test.info.class_names == ('cat', 'dog', 'emu')
    names = [test.record_name(i).split('/')[-2] for i in range(len(test))]
    assert [test.info.class_names[test[i]['label']] for i in range(len(test))] == names
    assert 'the model has 3' in caplog.text


def test_classes_that_the_model_lacks_are_left_out(repo, folder, caplog):
    test = opened(repo, folder('cat', 'emu'), folder('cat', 'dog', 'emu')).source
    assert test.info.class_names == ('cat', 'emu')
    assert np.bincount(test.labels()).tolist() == [8, 8]
    assert 'dog (16 of 24 examples are kept)' in caplog.text


@pytest.mark.parametrize(
    ('names', 'labels'),
    [
        (tuple('0123'), None),  # as many, and no names
        (('n02123045', 'n02099601', 'n01518878', 'n01440764'), [0, 1, 2, 3]),
    ],
)
def test_names_that_cannot_be_compared_leave_the_numbers(repo, folder, tmp_path, names, labels):
    data = tar_of(tmp_path / 'tar', names, labels or [3, 2, 1, 0])
    test = opened(repo, folder('cat', 'dog', 'emu', 'fox'), data).source
    assert test.labels().tolist() == (labels or [3, 2, 1, 0])


def test_a_name_of_two_classes_tells_nothing(repo, folder, tmp_path, capsys):
    data = tar_of(tmp_path / 'tar', ('crane', 'crane'), [0, 1])
    words = training(repo, tmp_path / 'run', folder('crane', 'emu'), data)
    assert mentions(refused(capsys, *words), 'crane, crane', 'emu, crane')


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """`checkpoint('zebra', 'apple')`: files for transformers of a ViT with these classes."""

    def write(*names):
        fields = dict(patch_size=4, width=16, depth=1, mlp_dim=24, num_heads=2)
        module = vit.Model(num_classes=len(names), **fields)
        images = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
        shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), shapes)
        inputs = IMAGES / np.float32(127.5) - 1
        logits = np.asarray(jax.jit(module.apply)({'params': params}, inputs)['logits'])
        params['head']['bias'] -= np.median(logits, axis=0)  # so that it finds every class
        model = {'name': 'vit', 'num_classes': len(names), **fields}
        stored = TrainedModel.from_file(params, model, (8, 8), 'test')
        path = tmp_path_factory.mktemp('vit') / 'files'
        interop.write(dataclasses.replace(stored, class_names=names), path)
        return path

    return write


@pytest.fixture(scope='module')
def zebra(checkpoint):
    return checkpoint('zebra', 'apple')


@pytest.fixture(scope='module')
def found(zebra, tmp_path_factory):
    """A folder of images in which each has the class that the checkpoint finds in it."""
    root = tmp_path_factory.mktemp('found')
    model = load.open_model(zebra)
    logits = jax.jit(model.model.apply)(model.variables, IMAGES / np.float32(127.5) - 1)['logits']
    labels = np.asarray(logits).argmax(-1)
    assert 0 < labels.sum() < 24
    for i, label in enumerate(labels):
        (root / model.class_names[label]).mkdir(exist_ok=True)
        Image.fromarray(IMAGES[i]).save(root / model.class_names[label] / f'{i}.png')
    return root


def evaluated(capsys, checkpoint, data, *words):
    command = ['evaluate', '--checkpoint', checkpoint, '--source', f'folder:{data}', '--json']
    assert main([*map(str, command), '--split', 'train', *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_the_names_of_its_classes(zebra, found, tmp_path, capsys):
    report = evaluated(capsys, zebra, found, '--report', str(tmp_path / 'confusion.png'))
    assert report['train/accuracy'] == 1
    assert [row['class'] for row in report['classes']['rows']] == ['zebra', 'apple']
    assert np.trace(report['classes']['matrix']) == 24
    (tmp_path / 'part').mkdir()
    (tmp_path / 'part' / 'apple').symlink_to(found / 'apple')
    assert evaluated(capsys, zebra, tmp_path / 'part')['train/accuracy'] == 1
    (tmp_path / 'part' / 'zebra').symlink_to(found / 'apple')
    assert evaluated(capsys, zebra, tmp_path / 'part')['train/accuracy'] == 0.5


def test_a_checkpoint_of_other_classes_is_refused(zebra, folder, capsys):
    words = ['evaluate', '--checkpoint', zebra, '--source', folder('apple', 'emu')]
    error = refused(capsys, *words, '--split', 'train')
    assert mentions(error, 'emu, apple', 'zebra, apple')


def head_of(repo, checkpoint, data, *overrides):
    """The head that a run starts with, and the notes about it."""
    config = config_lib.load(
        f'{repo}/experiments/vit/finetune.py:auto',
        [f'data.source={data}', f'init.from={checkpoint}', 'batch_size=8', *overrides],
    )
    training = build.build(fine_tune.complete_config(config).config, jax.devices()[:1])
    found = start.find_origin(training)
    return found.params.get('head'), '\n'.join(found.notes)


@pytest.mark.slow
def test_a_head_is_put_into_the_order_of_the_data(repo, checkpoint, folder):
    stored = checkpoint('zebra', 'apple', 'kiwi')
    theirs = interop.read(stored).params['head']
    head, notes = head_of(repo, stored, folder('apple', 'kiwi', 'zebra'))
    for name in ('kernel', 'bias'):
        np.testing.assert_array_equal(head[name], theirs[name][..., [1, 2, 0]])
    assert mentions(notes, 'head', 'zebra, apple, kiwi')
    part, _ = head_of(repo, stored, folder('apple', 'kiwi'), 'model.num_classes=3')
    np.testing.assert_array_equal(part['bias'], theirs['bias'][[1, 2, 0]])
    assert head_of(repo, stored, folder('apple', 'kiwi'))[0] is None
    head, notes = head_of(repo, stored, folder('0', '1', '2'))
    np.testing.assert_array_equal(head['bias'], theirs['bias'])
    assert 'head' not in notes


@pytest.mark.slow
def test_a_head_of_other_classes_starts_anew(repo, zebra, folder):
    head, notes = head_of(repo, zebra, folder('apple', 'emu'))
    assert head is None
    lines = [line for line in notes.splitlines() if line.startswith('head: ')]
    assert says(lines, '2 outputs', '(zebra, apple)', '(emu, apple)')


@pytest.mark.parametrize(
    ('names', 'counts', 'lines'),
    [
        (('cat', 'dog'), [20, 3], ['2 classes: cat 20, dog 3']),
        (('cat', 'dog'), None, ['2 classes: cat, dog']),
        (('a', 'b'), [1234, 0], ['2 classes: a 1,234, b 0', '1 class has no example: b']),
        (tuple('abcdef'), [5] * 6, ['6 classes, 5 examples each: a 5, b 5, c 5, ...']),
        (tuple('012345'), [5, 5, 5, 5, 5, 7], ['6 classes, 5 to 7 examples each']),
        (
            tuple('012345'),
            [0, 5, 5, 5, 5, 7],
            ['6 classes, 0 to 7 examples each', '1 class has no example: 0'],
        ),
        (('a\x1b',), [3], ['1 class: a\\u001b 3']),
    ],
)
def test_the_first_lines_name_classes_and_their_counts(names, counts, lines):
    info = SourceInfo(len(names), names)
    assert start.class_lines(info, None if counts is None else np.array(counts)) == lines


def test_other_numbers_of_a_class_are_refused_where_they_are_weights():
    data = open_dataset(Data(source='digits', split='train[:2 per class]'), 4)
    compatibility.require_same_class_counts([2] * 10, data)
    compatibility.require_same_class_counts(None, data)
    with pytest.raises(UserError, match=r'different.*examples'):
        compatibility.require_same_class_counts([2] * 9 + [3], data)
