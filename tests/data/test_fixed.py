"""Batches are a function of (seed, k): nothing else may show in them."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import loading

from vit_jax.data.batches import Process, kinds_from_checkpoint
from vit_jax.data.dataset import Dataset
from vit_jax.data.records import BrokenRecord, SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms, transform
from vit_jax.errors import UserError
from vit_jax.runtime.watchdog import Stalled

PLAIN = parse_transforms('')
AUGMENTED = parse_transforms('pad_and_crop(2)|flip|random_erasing(0.3)')


class Numbered:
    """Record i is an image with structure, its label i % 10 and its number."""

    info = SourceInfo(10, tuple('abcdefghij'))

    def __init__(self, size, shape=(6, 5, 3)):
        self.size = size
        self.reads = []
        self._images = np.random.default_rng(0).integers(0, 256, (size, *shape), np.uint8)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        return {'image': self._images[index], 'label': index % 10, 'number': index}

    def labels(self):
        return np.arange(self.size) % 10

    def record_name(self, index):
        return f'number {index}'


def numbered(size, **options):
    return Subset('numbered train', [(Numbered(size, **options), np.arange(size))])


def take(n, batches):
    taken = list(itertools.islice(batches, n))
    batches.close()
    return taken


def train(source, n, transforms=AUGMENTED, **options):
    options = {'batch_size': 8, 'seed': 3, 'threads': 2} | options
    return take(n, loading.train_batches(source, transforms, **options))


def assert_equal(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


# -- training ------------------------------------------------------------------------------------


def test_arrays():
    (batch,) = train(numbered(20), 1)
    shapes = {key: (array.shape, array.dtype.name) for key, array in batch.items()}
    assert shapes == {
        'image': ((8, 6, 5, 3), 'uint8'),
        'label': ((8,), 'int32'),
        'number': ((8,), 'int32'),
        'index': ((8,), 'int32'),
        'mask': ((8,), 'float32'),
    }


def test_element_spec_is_one_example_of_a_batch():
    source = numbered(20)
    transforms = parse_transforms('resize(4)|value_range(0, 1)')
    spec = loading.open_as_dataset(source, transforms, batch_size=8).shapes[-1].spec
    (batch,) = train(source, 1, transforms)
    assert {k: (s.shape, s.dtype) for k, s in spec.items()} == {
        k: (a.shape[1:], a.dtype) for k, a in batch.items() if k not in ('index', 'mask')
    }


@pytest.mark.parametrize('batch_size', [1, 7, 10, 30])
def test_every_epoch_is_a_permutation(batch_size):
    batches = train(numbered(30), 90 // batch_size + 1, PLAIN, batch_size=batch_size)
    stream = np.concatenate([batch['number'] for batch in batches])[:90].reshape(3, 30)
    for epoch in stream:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(30))
    assert not np.array_equal(stream[0], stream[1])
    assert not np.array_equal(stream[1], stream[2])


def test_records_keep_image_and_label_together():
    source = numbered(30)
    for batch in train(source, 4, PLAIN):
        np.testing.assert_array_equal(batch['index'], batch['number'])
        np.testing.assert_array_equal(batch['mask'], 1)
        for image, label, number in zip(*list(batch.values())[:3], strict=True):
            np.testing.assert_array_equal(image, source[number]['image'])
            assert label == number % 10


def test_seeds_differ_in_order_and_augmentation():
    one, other = train(numbered(30), 2), train(numbered(30), 2, seed=4)
    assert not np.array_equal(one[0]['number'], other[0]['number'])
    constant = Subset('x', [(Numbered(30), np.zeros(30, int))])
    images = [train(constant, 1, seed=seed)[0]['image'] for seed in (3, 4)]
    assert not np.array_equal(*images)


def test_augmentation_differs_between_examples_and_epochs():
    constant = Subset('x', [(Numbered(16), np.zeros(16, int))])
    images = np.concatenate([batch['image'] for batch in train(constant, 4)])
    assert len(np.unique(images.reshape(32, -1), axis=0)) > 25


@pytest.mark.parametrize('start', [1, 3, 4, 50])
def test_resumed_is_continued(start):
    """Also across an epoch, which ends in the middle of batch 3."""
    source = numbered(30)
    whole = train(source, start + 4)
    assert_equal(train(source, 4, start_step=start), whole[start:])


@pytest.mark.parametrize('processes', [2, 4])
def test_processes_together_see_the_global_batch(processes):
    source = numbered(30)
    parts = [train(source, 5, process_index=p, process_count=processes) for p in range(processes)]
    together = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(together, train(source, 5))


def test_a_process_with_several_parts_makes_the_rows_of_each():
    data = loading.open_as_dataset(numbered(29), AUGMENTED, batch_size=8, seed=3, multiple=8)
    own = Dataset(data.plan, Process((0, 3), 4), data.loading)
    for of in (lambda data: take(5, data.train_batches()), lambda data: list(data.eval_batches())):
        expected = [{key: x[[0, 1, 6, 7]] for key, x in batch.items()} for batch in of(data)]
        assert_equal(of(own), expected)
    assert own.count(take(1, own.train_batches())[0]) == {'images': 8}


@pytest.mark.parametrize(
    ('shards', 'count', 'expected'),
    [
        ((0,), 1, Process()),
        (range(8), 8, Process()),
        ((4, 5, 6, 7), 8, Process((1,), 2)),
        ((2, 3), 6, Process((1,), 3)),
        ((0, 1, 8, 9), 16, Process((0, 4), 8)),
        ((0, 1, 6, 15), 16, Process((0, 1, 6, 15), 16)),
        ((1, 2), 4, Process((1, 2), 4)),
    ],
)
def test_shards_are_joined_where_they_lie_together(shards, count, expected):
    found = Process.holding(shards, count)
    assert found == expected
    rows = [4 * shard + i for shard in shards for i in range(4)]
    np.testing.assert_array_equal(found.rows(4 * count), rows)


@pytest.mark.parametrize('options', [{'threads': 0}, {'threads': 5}, {'cache': True}])
def test_how_it_is_read_does_not_show(options):
    assert_equal(train(numbered(30), 12, **options), train(numbered(30), 12))


@pytest.mark.slow
def test_worker_processes_do_not_show():
    source = open_source('digits', 'train[:100]')
    assert_equal(train(source, 4, workers=2, threads=1, start_step=3), train(source, 7)[3:])


@pytest.mark.slow
def test_worker_processes_pass_mistakes_on():
    digits = Numbered(50)
    digits.info = SourceInfo(9, tuple('abcdefghi'))
    source = Subset('numbered train', [(digits, np.arange(50))])
    with pytest.raises(UserError, match=r'\d*9.*9.*0\.\.8'):
        train(source, 50, workers=1, threads=1)


WITH_WORKERS = """
import multiprocessing, os, signal, threading, time
from vit_jax.config.run import Data
from vit_jax.data.dataset import open_dataset

def strike():
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(workers[0].pid, number)
    return workers[0].pid

if __name__ == '__main__':
    data = open_dataset(Data(source='digits', split='train[:100]', workers=1, threads=1), 8)
    batches = data.train_batches()
    threading.Thread(target=strike).start()  # before it has imported anything
    next(batches)
    worker = strike()
    for _ in range(30):
        next(batches)
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='needs /proc')
def test_worker_processes_live_as_long_as_their_parent(tmp_path):
    """They outlast a signal to the whole job, and not the parent's sudden death."""
    script = tmp_path / 'script.py'
    script.write_text(WITH_WORKERS)
    env = {**os.environ, 'PYTHONPATH': os.getcwd()}
    done = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    assert done.returncode == -signal.SIGKILL
    worker = pathlib.Path('/proc') / done.stdout.decode().strip()
    deadline = time.monotonic() + 20
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(worker)


def running(process):
    """Whether a process of Linux exists and has not ended."""
    try:
        return process.joinpath('stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def test_cache_reads_each_record_once():
    records = Numbered(30)
    source = Subset('numbered train', [(records, np.arange(30))])
    data = loading.open_as_dataset(source, AUGMENTED, batch_size=8, cache=True, threads=0)
    for _ in range(2):
        take(20, data.train_batches())
        list(data.eval_batches())
    assert sorted(records.reads) == list(range(30))


def test_transforms_cannot_spoil_the_cache():
    source = numbered(8)
    first = train(source, 1, cache=True, start_step=0)
    train(source, 5, cache=True)
    assert_equal(train(source, 1, cache=True, start_step=0), first)


def test_many_threads_give_the_generator_of_the_right_example():
    """The generators are reused within a thread, never between threads."""
    source = numbered(64)
    expected = train(source, 40, threads=0)
    assert_equal(train(source, 40, threads=12), expected)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'batch_size': 31}, '30 examples .*batch_size=31'),
        ({'batch_size': 0}, 'batch_size=0: must be positive'),
        ({'process_count': 3}, r'batch_size=8: .* 3'),
        ({'seed': -1}, 'seed=-1'),
        ({'threads': -1}, 'threads=-1: must be 0 or more'),
        ({'workers': -2}, 'workers=-2: must be 0 or more'),
        ({'cache': True, 'workers': 2}, 'processes.*share'),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        train(numbered(30), 1, **options)


def test_different_shapes_name_the_record():
    parts = [(Numbered(4), np.arange(4)), (Numbered(4, shape=(6, 5, 1)), np.arange(4))]
    source = Subset('mixed', parts)
    with pytest.raises(UserError, match=r'number \d: image .*\(6, 5, 1\)'):
        train(source, 1)


def test_a_transform_that_cannot_names_the_record():
    with pytest.raises(UserError, match=r'\d.*central_crop\(7\)'):
        train(numbered(8), 1, parse_transforms('central_crop(7)'))


class Stuck(Numbered):
    """Hangs at record 5 until released."""

    def __init__(self, size):
        super().__init__(size)
        self.release = threading.Event()

    def __getitem__(self, index):
        if index == 5:
            self.release.wait(30)
        return super().__getitem__(index)


def test_a_loader_that_hangs_says_where():
    stuck = Stuck(8)
    source = Subset('stuck', [(stuck, np.arange(8))])
    with pytest.raises(Stalled, match=r'(?s)batch.*0\.5.*release\.wait'):
        train(source, 3, stall_seconds=0.5)
    stuck.release.set()


# -- evaluation ----------------------------------------------------------------------------------


def evaluate(source, transforms=PLAIN, **options):
    return list(loading.eval_batches(source, transforms, **{'batch_size': 8} | options))


@pytest.mark.fault(30)
@pytest.mark.parametrize(('size', 'batch_size'), [(30, 32), (30, 8), (32, 8), (1, 4), (33, 32)])
@pytest.mark.parametrize('processes', [1, 2, 4])
def test_every_example_counts_once(size, batch_size, processes):
    parts = [
        evaluate(numbered(size), batch_size=batch_size, process_index=p, process_count=processes)
        for p in range(processes)
    ]
    for part in parts:
        assert len(part) == -(-size // batch_size)
        assert {batch['image'].shape for batch in part} == {(batch_size // processes, 6, 5, 3)}
    together = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    mask = np.concatenate([batch['mask'] for batch in together])
    assert mask.dtype == np.float32
    np.testing.assert_array_equal(mask, np.arange(len(mask)) < size)
    numbers = np.concatenate([batch['number'] for batch in together])
    np.testing.assert_array_equal(numbers[mask == 1], np.arange(size))


def test_padding_is_zero():
    last = evaluate(numbered(9))[-1]
    assert not last['image'][1:].any()
    assert not last['label'][1:].any()


def test_evaluation_is_repeatable_even_with_random_transforms():
    assert_equal(evaluate(numbered(20), AUGMENTED), evaluate(numbered(20), AUGMENTED, threads=0))


def test_broken_records_are_masked_not_replaced():
    class Broken(Numbered):
        def __getitem__(self, index):
            if index in (0, 11):
                raise BrokenRecord(f'number {index}: torn')
            return super().__getitem__(index)

    source = Subset('broken', [(Broken(20), np.arange(20))])
    batches = evaluate(source)
    mask = np.concatenate([batch['mask'] for batch in batches])
    np.testing.assert_array_equal(np.flatnonzero(mask == 0), [0, 11, 20, 21, 22, 23])
    assert source.broken == {0: 'number 0: torn', 11: 'number 11: torn'}


def test_all_broken_is_an_error_not_a_hang():
    class Broken(Numbered):
        def __getitem__(self, index):
            raise BrokenRecord(f'number {index}: torn')

    with pytest.raises(UserError, match='6 of 20 records broken'):
        train(Subset('broken', [(Broken(20), np.arange(20))]), 1)


@pytest.mark.parametrize(
    ('info', 'value', 'said'),
    [
        (SourceInfo(10, ()), 2**32 + 5, "'number'.*4294967301"),
        (SourceInfo(10, (), 7), [3, 7], r"'number'.*7.* 0\.\.6"),
        (SourceInfo(10, (), 7), [3, -1], "'number'.*-1"),
    ],
)
def test_numbers_that_would_become_others_name_the_record(info, value, said):
    class Odd(Numbered):
        def __getitem__(self, index):
            good = np.zeros(np.shape(value), np.int64)
            return {'number': np.array(value) if index == 11 else good}

    source = Odd(20)
    source.info = info
    with pytest.raises(UserError, match=f'number 11: {said}'):
        evaluate(Subset('odd', [(source, np.arange(20))]), PLAIN)


class Unlike(Numbered):
    """Record 11 has other values of one field, or lacks it."""

    def __init__(self, name, usual, odd, info=Numbered.info):
        super().__init__(20)
        self.name, self.usual, self.odd, self.info = name, usual, odd, info

    def __getitem__(self, index):
        record = super().__getitem__(index) | {self.name: self.usual}
        if index == 11:
            record.pop(self.name)
            record |= {} if self.odd is None else {self.name: self.odd}
        return record


def unlike(*fields, **options):
    return Subset('unlike train', [(Unlike(*fields, **options), np.arange(20))])


IMAGE = np.zeros((6, 5, 3), np.uint8)


@pytest.mark.fault(123)
@pytest.mark.parametrize('read', [evaluate, lambda source: train(source, 3, PLAIN)])
@pytest.mark.parametrize(
    ('name', 'usual', 'odd', 'said'),
    [
        ('image', IMAGE, IMAGE.astype(np.int16) + 21200, 'int16, .*uint8'),
        ('image', IMAGE, IMAGE.astype(np.float32), 'float32, .*uint8'),
        ('image', IMAGE.astype(np.float32), IMAGE, 'uint8, .*float32'),
        ('masks', np.ones((1, 6, 5), bool), np.full((1, 6, 5), 255, np.uint8), 'uint8'),
        ('ids', np.zeros(2, np.int64), np.array([0.5, 1]), 'float64, .* int32'),
        ('score', 0.5, 1, 'int64, .*float32'),
        ('ids', np.zeros(2, int), np.array(['a', 'b']), '<U1'),
        ('ids', np.zeros(2, int), [[1], [1, 2]], 'not an array'),
        ('ids', np.zeros(2, int), None, "'ids'"),
    ],
)
def test_arrays_of_another_dtype_name_the_record(read, name, usual, odd, said):
    with pytest.raises(UserError, match=rf"number 11: .*'{name}'.*{said}|number 11: {said}"):
        read(unlike(name, usual, odd))


def test_numbers_that_mean_the_same_are_of_one_dtype():
    """Integers of any width are int32, numbers of any byte order and places of any kind float32."""
    for name, usual, odd in (
        ('ids', np.zeros(2, np.int64), np.ones(2, np.int16)),
        ('score', 0.5, np.float64(1)),
        ('image', IMAGE.astype('<u2'), IMAGE.astype('>u2')),
        ('points', np.zeros((2, 2), np.float32), np.ones((2, 2), int)),
    ):
        assert len(evaluate(unlike(name, usual, odd))) == 3


@pytest.mark.fault(124)
@pytest.mark.parametrize('odd', [np.nan, np.inf, 1e300])
@pytest.mark.parametrize(
    ('name', 'shape'), [('image', (6, 5, 3)), ('points', (2, 2)), ('label', ())]
)
def test_pixels_and_places_that_are_not_finite_are_broken(name, shape, odd):
    usual = np.zeros(shape, np.float64)
    spoilt = usual.copy()
    spoilt[(0,) * len(shape)] = odd
    # A label is any number where there are no classes.
    options = {'info': SourceInfo(0, ())} if name == 'label' else {}
    source = unlike(name, usual, spoilt, **options)
    mask = np.concatenate([batch['mask'] for batch in evaluate(source)])
    np.testing.assert_array_equal(np.flatnonzero(mask == 0), [11, 20, 21, 22, 23])
    assert source.broken == {11: f"number 11: '{name}' holds {spoilt.max()}"}


@transform
def divide_by_the_least():
    return lambda image: image.astype(np.float32) / image.min()


@pytest.mark.fault(124)
@pytest.mark.filterwarnings('ignore:divide by zero', 'ignore:invalid value')
def test_pixels_that_a_transform_makes_not_finite_are_broken():
    parse = parse_transforms(f'{__name__}.divide_by_the_least')
    source = unlike('image', IMAGE + 1, np.arange(90, dtype=np.uint8).reshape(IMAGE.shape))
    evaluate(source, parse)
    assert source.broken == {11: "number 11: 'image' holds nan"}


@pytest.mark.parametrize('spec', ['random_erasing(1)', 'value_range(0, 1)', 'gaussian_blur(p=1)'])
def test_transforms_of_bytes_take_no_other_numbers(spec):
    with pytest.raises(UserError, match='float32'):
        train(unlike('image', *2 * [IMAGE.astype(np.float32)]), 1, parse_transforms(spec))


# -- images of several sizes -------------------------------------------------------------------

SIZES = ((8, 12), (12, 8), (16, 16))
FRAMES = {'plan': 'sizes', 'sizes': SIZES}


class Framed(Numbered):
    """Images of random sizes up to 24 pixels, white but for a box."""

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        height, width = rng.integers(4, 25, 2)
        image = np.full((height, width, 3), 255, np.uint8)
        x1, y1 = rng.integers(2, width + 1), rng.integers(2, height + 1)
        image[:y1, :x1] = 0
        boxes = np.array([[0, 0, x1, y1]], np.float32)
        return {'image': image, 'boxes': boxes, 'number': index}


def framed(size=30):
    return Subset('framed', [(Framed(size), np.arange(size))])


def size_of(batch):
    return batch['image'].shape[1:3]


def test_a_batch_has_one_of_the_sizes_as_the_seed_and_its_number_say():
    batches = train(framed(), 40, PLAIN, **FRAMES)
    sizes = [size_of(batch) for batch in batches]
    assert set(sizes) == set(SIZES)
    assert sizes != [size_of(batch) for batch in train(framed(), 40, PLAIN, **FRAMES, seed=4)]
    assert_equal(train(framed(), 5, PLAIN, **FRAMES, start_step=7), batches[7:12])
    parts = [train(framed(), 6, PLAIN, **FRAMES, process_index=p, process_count=2) for p in (0, 1)]
    for step, batch in enumerate(batches[:6]):
        together = [part[step]['image'] for part in parts]
        np.testing.assert_array_equal(np.concatenate(together), batch['image'])


def test_a_checkpoint_tells_every_array_of_every_size():
    data = loading.open_as_dataset(framed(), PLAIN, batch_size=6, **FRAMES)
    kinds = kinds_from_checkpoint(json.loads(json.dumps(data.facts())))
    assert kinds == [(2, shape.spec) for shape in data.shapes]
    assert [sorted(spec) for _, spec in kinds] == [['boxes', 'image', 'number', 'pixel_mask']] * 3


def test_padding_is_marked_and_boxes_stay_with_their_pixels():
    for batch in train(framed(), 12, PLAIN, **FRAMES):
        real = batch['pixel_mask']
        assert real.dtype == bool
        assert not batch['image'][~real].any()
        for image, mask, (box,) in zip(batch['image'], real, batch['boxes'], strict=True):
            height, width = mask.any(1).sum(), mask.any(0).sum()
            assert mask[:height, :width].all()
            dark = (image.mean(-1) < 128) & mask
            rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
            assert abs(box[2] - (columns[-1] + 1 if len(columns) else 0)) <= 1
            assert abs(box[3] - (rows[-1] + 1 if len(rows) else 0)) <= 1


def test_the_shapes_are_known_before_any_batch_is_made():
    data = loading.open_as_dataset(framed(), PLAIN, batch_size=8, **FRAMES)
    assert [shape.spec['image'].shape for shape in data.shapes] == [(*s, 3) for s in SIZES]
    assert sum(shape.share for shape in data.shapes) == pytest.approx(1)
    assert data.image_size == SIZES[-1]


def test_evaluation_pads_everything_to_the_last_size_in_any_batch():
    def results(batch_size):
        batches = evaluate(framed(), batch_size=batch_size, **FRAMES)
        assert {size_of(batch) for batch in batches} == {SIZES[-1]}
        rows = [
            (int(i), image.tobytes())
            for batch in batches
            for i, image, mask in zip(batch['index'], batch['image'], batch['mask'], strict=True)
            if mask
        ]
        return sorted(rows)

    assert results(8) == results(7)
    assert [i for i, _ in results(8)] == list(range(30))


# -- the module ----------------------------------------------------------------------------------


def test_imports_are_light():
    program = (
        'import sys, vit_jax.data.dataset, vit_jax.data.sources; '
        'from vit_jax.data.transforms import parse_transforms, registry; '
        "parse_transforms('pad_and_crop(1)|flip'); print(*sys.modules); "
        '[*map(registry.find_function, registry.modules())]; print(*sys.modules)'
    )
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, env=os.environ
    )
    used, loaded = (set(line.split()) for line in done.stdout.splitlines())
    assert 'vit_jax.data.dataset' in loaded, done.stderr
    heavy = {'jax', 'flax', 'grain', 'tensorflow', 'tensorflow_datasets', 'torch', 'sklearn'}
    assert not loaded & heavy
    # Only modules with transforms of the text are imported.
    assert 'vit_jax.data.transforms.image' in used
    others = {'distortions', 'randaugment', 'segmentation', 'text', 'tf_image'}
    assert {m.rpartition('.')[2] for m in loaded - used} >= others
