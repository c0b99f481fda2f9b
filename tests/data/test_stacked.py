"""Batches by array are those that are made example by example, or they are not made by array."""

import contextlib
import threading

import numpy as np
import pytest

from vit_jax.data import dataset, stacked
from vit_jax.data.batches import Process
from vit_jax.data.dataset import Loader
from vit_jax.data.plans import make_plan
from vit_jax.data.plans.base import Examples
from vit_jax.data.records import BrokenRecord, SourceInfo, example_rng
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

SIZE = 23


class Source:
    """Images with a label and a box each; record 5 is what `odd` changes it to."""

    info = SourceInfo(10, tuple('abcdefghij'))

    def __init__(self, odd=None, boxes=False):
        rng = np.random.default_rng(0)
        self._images = rng.integers(0, 256, (SIZE, 6, 5, 3), np.uint8)
        self._odd, self._boxes = odd, boxes

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        record = {'image': self._images[index], 'label': index % 10, 'number': index}
        if self._boxes:
            record['boxes'] = np.array([[0, 0, 2, 3]], np.float32)
        if index == 5 and self._odd is BrokenRecord:
            raise BrokenRecord('torn')
        record['weight'] = index / 7
        return record | (self._odd or {}) if index == 5 else record

    def labels(self):
        return np.arange(SIZE) % 10

    def record_name(self, index):
        return f'number {index}'


def kept(transforms, **options):
    """Examples that are all in memory."""
    source = Subset('numbered train', [(Source(**options), np.arange(SIZE))])
    examples = Examples(source, parse_transforms(transforms), cache=True)
    for index in range(SIZE):
        try:
            examples.read(index)
        except BrokenRecord:
            continue
    return examples


@pytest.mark.parametrize(
    'transforms', ['', 'central_crop(4)', 'flip', 'pad_and_crop(2)', 'pad_and_crop(pad=1)|flip']
)
def test_batches_do_not_show_how_they_are_made(transforms, monkeypatch):
    examples = kept(transforms)
    assert examples.stacked is not None
    plan = make_plan('fixed', examples, batch_size=8, seed=3, multiple=4)
    loaders = [Loader(plan, Process()), Loader(plan, Process((1,), 2))]

    def batches():
        return [
            one
            for loader in loaders
            for one in [*map(loader.train_batch, range(7)), *map(loader.eval_batch, range(3))]
        ]

    together = batches()
    assert not together[9]['mask'].all()  # the last of an evaluation is padded
    monkeypatch.setattr(Examples, 'stacked', None)
    for made, expected in zip(together, batches(), strict=True):
        assert made.keys() == expected.keys()
        for name, array in expected.items():
            assert made[name].dtype == array.dtype
            np.testing.assert_array_equal(made[name], array, err_msg=name)


@pytest.mark.parametrize('pad', [1, 4, 2**30])  # of the last, NumPy redraws half of the numbers
def test_random_bits_become_the_numbers_that_a_generator_draws(pad):
    for move in (stacked.PadAndCrop(pad), stacked.Flip()):
        bits = [example_rng(7, draw).bit_generator.random_raw() for draw in range(1000)]
        numbers = move.convert(np.array(bits, np.uint64))
        expected = [move.draw(example_rng(7, draw)) for draw in range(1000)]
        is_final = numbers != stacked.AGAIN
        np.testing.assert_array_equal(numbers[is_final], np.array(expected)[is_final])
        share = 1 - (1 - 2**32 % (2 * pad + 1) / 2**32) ** 2 if pad > 4 else 0
        assert np.mean(~is_final) == pytest.approx(share * (move != stacked.Flip()), abs=0.05)


def test_numbers_that_take_more_bits_are_drawn_one_by_one(monkeypatch):
    transforms = kept('pad_and_crop(2)|flip').stacked
    draws = np.arange(SIZE)
    expected = transforms.rows(draws, 3, draws)['image']
    convert = stacked.PadAndCrop.convert
    monkeypatch.setattr(
        stacked.PadAndCrop,
        'convert',
        lambda self, bits: np.where(draws % 3 == 0, stacked.AGAIN, convert(self, bits)),
    )
    np.testing.assert_array_equal(transforms.rows(draws, 3, draws)['image'], expected)


def test_a_process_may_have_only_padding():
    plan = make_plan('fixed', kept('pad_and_crop(2)|flip'), batch_size=22, multiple=2)
    batch = Loader(plan, Process((1,), 2)).eval_batch(1)  # one example, of the other process
    assert len(batch['mask']) == 11 and not any(array.any() for array in batch.values())


def test_a_batch_does_not_change_the_examples():
    examples = kept('pad_and_crop(2)|flip')
    before = {name: array.copy() for name, array in examples.stacked.arrays.items()}
    batch = Loader(make_plan('fixed', examples, batch_size=8), Process()).train_batch(0)
    batch['image'][:] = 0
    for name, array in before.items():
        np.testing.assert_array_equal(examples.stacked.arrays[name], array)


@pytest.mark.parametrize(
    'odd',
    [
        BrokenRecord,
        {'image': np.zeros((5, 5, 3), np.uint8)},
        {'number': 2**40},
        {'number': 1.5},
        {'weight': np.nan},
        {'more': 1},
    ],
    ids=['broken', 'size', 'range', 'dtype', 'nan', 'array'],
)
def test_an_odd_example_is_left_to_those_who_name_it(odd):
    assert kept('', odd=odd).stacked is None


def test_the_name_of_an_odd_example_is_given():
    plan = make_plan('fixed', kept('flip', odd={'number': 2**40}), batch_size=SIZE)
    with pytest.raises(UserError, match=r"5.*'number'.*1099511627776"):
        Loader(plan, Process()).train_batch(0)


def test_only_moves_known_by_array_and_images_that_move_alone_are_stacked(monkeypatch):
    assert kept('flip|random_erasing(0.3)').stacked is None
    assert kept('flip', boxes=True).stacked is None
    assert kept('', boxes=True).stacked is not None
    monkeypatch.setattr(stacked, 'LARGEST', SIZE * 90)
    assert kept('').stacked is None


def test_a_cache_that_is_not_full_is_read():
    source = Subset('numbered train', [(Source(), np.arange(SIZE))])
    examples = Examples(source, parse_transforms(''), cache=True)
    loader = Loader(make_plan('fixed', examples, batch_size=8), Process())
    first = loader.train_batch(0)
    assert examples.stacked is None
    np.testing.assert_array_equal(loader.train_batch(0)['image'], first['image'])


def readers():
    return [one for one in threading.enumerate() if one.name == 'data-reader' and one.is_alive()]


@pytest.mark.parametrize('small', [True, False])
def test_small_batches_are_made_without_threads_once_all_examples_are_kept(small, monkeypatch):
    monkeypatch.setattr(dataset, 'SMALL', 8 * 200 if small else 8)
    source = Subset('numbered train', [(Source(), np.arange(SIZE))])
    plan = make_plan('fixed', Examples(source, parse_transforms('flip'), cache=True), batch_size=8)
    before, alone = len(readers()), Loader(plan, Process())
    with contextlib.closing(dataset.Dataset(plan).train_batches(2)) as batches:
        for k in range(2, 14):
            for name, rows in next(batches).items():
                np.testing.assert_array_equal(rows, alone.train_batch(k)[name])
            if k == 2 or not small:
                assert len(readers()) == before + 1
        assert len(readers()) == before + (not small)
    assert len(list(dataset.Dataset(plan).eval_batches())) == plan.eval_steps == 3
