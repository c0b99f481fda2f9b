"""Batches by plans from outside of the package, and records of images and texts."""

import itertools

import numpy as np
import pytest
from helpers import loading
from helpers.packed_vit.data import cut
from PIL import Image

from vit_jax.config.origin import dotted_names
from vit_jax.config.run import Data
from vit_jax.data import batches, vocabulary
from vit_jax.data.batches import ArraySpec
from vit_jax.data.dataset import Loader, open_dataset
from vit_jax.data.plans import fixed
from vit_jax.data.plans.base import Examples
from vit_jax.data.records import BrokenRecord, SourceInfo
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

LENGTH = 24
FITTED = 'helpers.packed_vit.data.fit_patches(4, 9)'


class Mixed:
    """Images of random sizes, clips of random lengths, and captions."""

    info = SourceInfo(10, tuple('abcdefghij'))

    def __init__(self, kind, broken=()):
        self.kind, self.broken = kind, broken

    def __len__(self):
        return 30

    def __getitem__(self, index):
        if index in self.broken:
            raise BrokenRecord(f'number {index}: torn')
        rng = np.random.default_rng(index)
        height, width = rng.integers(4, 13, 2) if self.kind == 'sizes' else (8, 8)
        frames = (int(rng.integers(1, 6)),) if self.kind == 'clips' else ()
        image = rng.integers(0, 256, (*frames, height, width, 3), np.uint8)
        text = {'caption': 'a cat' * (1 + index % 3)} if self.kind == 'captions' else {}
        return {'image': image, 'label': index % 10, **text}

    def labels(self):
        return np.arange(30) % 10

    def record_name(self, index):
        return f'number {index}'


def mixed(kind, **options):
    return Subset(f'{kind} train', [(Mixed(kind, **options), np.arange(30))])


def opened(kind, plan, transforms='', vocab=None, **options):
    options = {'batch_size': 4, 'seed': 3, 'threads': 0} | options
    broken = options.pop('broken', ())
    parsed = parse_transforms(transforms, vocab)
    return loading.open_as_dataset(mixed(kind, broken=broken), parsed, plan=plan, **options)


def packed(**options):
    plan = f'helpers.packed_vit.data(side=4, length={LENGTH}, most=4)'
    return opened('sizes', plan, FITTED, **options)


def take(data, n, start=0):
    return list(itertools.islice(data.train_batches(start), n))


# -- rows of several examples ----------------------------------------------------------------------


def test_a_row_may_hold_several_examples():
    data, source = packed(), Mixed('sizes')
    transforms = parse_transforms(FITTED)
    seen = []
    for batch in take(data, len(data.plan.rows) // 4):
        assert batch['patches'].shape == (4, LENGTH, 48)
        assert batch['index'].shape == batch['mask'].shape == (4, 4)
        for row in range(4):
            at = 0
            real = batch['mask'][row] == 1
            for slot, index in enumerate(batch['index'][row][real].tolist()):
                patches, places = cut(transforms(source[index], None)['image'], side=4)
                here = slice(at, at + len(patches))
                np.testing.assert_array_equal(batch['patches'][row, here], patches)
                np.testing.assert_array_equal(batch['places'][row, here], places)
                assert (batch['segments'][row, here] == slot + 1).all()
                assert batch['label'][row, slot] == index % 10
                at, seen = here.stop, [*seen, index]
            assert not batch['segments'][row, at:].any()
    assert len(seen) == len(set(seen)) > 20
    assert data.plan.examples_per_step > 4


def test_batches_of_a_users_plan_are_functions_of_seed_and_number():
    whole = take(packed(), 9)
    for one, other in zip(take(packed(), 4, start=5), whole[5:], strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=name)
    parts = [packed(process_index=p, process_count=2) for p in (0, 1)]
    for step in zip(whole[:3], *(take(part, 3) for part in parts), strict=True):
        for name, array in step[0].items():
            np.testing.assert_array_equal(array, np.concatenate([step[1][name], step[2][name]]))


def test_evaluation_has_an_example_a_row_unless_a_plan_says_otherwise():
    plan = 'helpers.my_plans.clips(frames=6)'
    data = opened('clips', plan, batch_size=8, broken=(5,))
    found = list(data.eval_batches())
    index, mask = (np.concatenate([b[name] for b in found]) for name in ('index', 'mask'))
    assert index.shape == mask.shape == (32,)
    np.testing.assert_array_equal(index[mask == 1], np.setdiff1d(np.arange(30), [5]))
    labels = np.concatenate([batch['label'] for batch in found])[mask == 1]
    np.testing.assert_array_equal(labels, index[mask == 1] % 10)


class Pairs(fixed.Plan):
    """Two examples a row, of which `rows` and `slots` say nothing."""

    def batch(self, k):
        return self.spec, np.arange(8).reshape(4, 2)


def test_rows_that_slots_do_not_describe_are_refused_in_one_line():
    plan = Pairs(Examples(mixed('clips'), parse_transforms("keep('label')")), batch_size=4)
    with pytest.raises(UserError, match=r'\(4, 2\) .*override `rows` or `slots`'):
        Loader(plan, batches.Process()).train_batch(0)


# -- clips -----------------------------------------------------------------------------------------


def test_clips_are_padded_and_their_frames_marked():
    data = opened('clips', 'helpers.my_plans.clips(frames=6)', 'flip|pad_and_crop(1)')
    assert data.image_size == (8, 8)
    for batch in take(data, 5):
        assert batch['image'].shape == (4, 6, 8, 8, 3)
        frames = [len(Mixed('clips')[i]['image']) for i in batch['index'].tolist()]
        np.testing.assert_array_equal(batch['image_mask'].sum(1), frames)
        assert not batch['image'][~batch['image_mask']].any()


# -- images and texts ------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def vocab():
    return vocabulary.train(['a cat', 'a dog sits'] * 50, 20, 'bpe')


def test_a_caption_becomes_ids_of_one_length_beside_its_image(vocab):
    data = opened('captions', 'fixed', "flip|lower('caption')|tokenize('caption', 7)", vocab)
    assert data.info.vocab_size == 20
    assert data.image_size == (8, 8)
    (batch,) = take(data, 1)
    assert batch['image'].shape == (4, 8, 8, 3)
    for ids, real, index in zip(
        *(batch[k] for k in ('caption', 'caption_mask', 'index')), strict=True
    ):
        text = Mixed('captions')[index]['caption']
        expected = vocab.encode(text)[:6].tolist()
        assert ids[real].tolist() == [*expected, vocabulary.EOS]
        assert not ids[~real].any()
        assert data.text(int(index)) == {'caption': text}


def test_an_empty_caption_is_refused(vocab):
    apply = parse_transforms("tokenize('caption', 7)", vocab)
    with pytest.raises(UserError, match="the text 'caption' is empty"):
        apply({'caption': ' '}, None)


def test_a_text_that_is_left_a_text_says_what_to_do(vocab):
    with pytest.raises(UserError, match=r"'caption' is text; .*tokenize\('caption', 64\)"):
        opened('captions', 'fixed').shapes  # noqa: B018
    with pytest.raises(UserError, match=r"'captoin' .*image"):
        take(opened('captions', 'fixed', "tokenize('captoin', 7)", vocab), 1)


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ("tokenize('caption', 1)", 'length=1.*2'),
        ('tokenize(length=9)', r"write tokenize\('caption', 9\)"),
        ('lower(3)', 'fields'),
    ],
)
def test_arguments_of_texts(vocab, spec, message):
    with pytest.raises(UserError, match=message):
        parse_transforms(spec, vocab)


# -- names and mistakes ----------------------------------------------------------------------------


def test_the_config_names_a_plan():
    named = {'source': 'digits', 'split': 'test[:20]', 'plan': 'fixed'}
    data = open_dataset(Data(threads=0, **named), 8)
    assert next(data.train_batches())['image'].shape == (8, 8, 8, 1)
    config = {'data': {'plan': 'my_lab.packing(length=2)'}}
    assert list(dotted_names(config)) == [('data.plan', 'my_lab.packing')]


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        ({'plan': 'fixt'}, r"unknown plan name 'fixt'; .* 'fixed'"),
        ({'plan': 'fixed(3)'}, r'fixed\(3\)'),
        ({'plan': 'fixed(length=3)'}, r"plan 'fixed\(length=3\)': .*unexpected keyword.*'length'"),
        ({'plan': 'fixed('}, "example.*'my_lab.packing"),
        ({'plan': 'fixed', 'sizes': ((8, 8),)}, 'sizes and plan'),
        ({'plan': 'helpers.loading'}, "has no 'Plan'"),
    ],
)
def test_mistakes(keys, message):
    with pytest.raises(UserError, match=message):
        open_dataset(Data(source='digits', split='test[:20]', **keys), 8)


def test_fit_pads_any_array_and_makes_the_mask_that_belongs_to_it():
    record = {'patches': np.ones((3, 2), np.float32), 'label': 4}
    shapes = {'patches': ((5, 2), 'f4'), 'patches_mask': ((5,), '?'), 'label': ((), 'i4')}
    spec = {name: ArraySpec(shape, np.dtype(kind)) for name, (shape, kind) in shapes.items()}
    row = batches.pad(record, spec)
    np.testing.assert_array_equal(row['patches_mask'], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(row['patches'].sum(1), [2, 2, 2, 0, 0])
    assert row['label'] == 4


def test_repeated_augmentation():
    """Each example of a batch occurs `times`, each time with its own random numbers."""
    dataset = opened('images', 'repeated(times=3)', 'random_crop(6)', batch_size=6, seed=1)
    plain = opened('images', 'fixed', 'random_crop(6)', batch_size=2, seed=1)
    for batch, few in zip(take(dataset, 20), take(plain, 20), strict=True):  # an epoch has 15
        assert batch['index'].tolist() == 3 * few['index'].tolist()
    copies = batch['image'][::2]
    assert not all(np.array_equal(copies[0], copy) for copy in copies)


@pytest.mark.parametrize('times', [0, 4])
def test_repeats_divide_the_batch(times):
    with pytest.raises(UserError, match=f'times={times}'):
        opened('images', f'repeated(times={times})', batch_size=6)


def test_progressive_resizing():
    """The examples of `fixed` in their order, at the size of the stage; whole in evaluation."""
    dataset = opened('images', 'progressive(sizes=(4, 6, 8), starts=(2, 3))', seed=1)
    plain = opened('images', 'fixed', seed=1)
    pairs = list(zip(take(dataset, 5), take(plain, 5), strict=True))
    assert [batch['image'].shape[1:3] for batch, _ in pairs] == [(4, 4)] * 2 + [(6, 6)] + [
        (8, 8)
    ] * 2
    for batch, whole in pairs:
        np.testing.assert_array_equal(batch['index'], whole['index'])
        side = batch['image'].shape[1]
        for small, image in zip(batch['image'], whole['image'], strict=True):
            pillow = Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(small, np.asarray(pillow))
    assert dataset.spec['image'].shape == (8, 8, 3)
    assert dataset.shapes[-1].spec['image'].shape == (8, 8, 3)


@pytest.mark.parametrize('options', ['sizes=(4, 6), starts=()', 'sizes=(4, 6, 8), starts=(3, 2)'])
def test_stages_have_sizes_and_rising_starts(options):
    with pytest.raises(UserError, match='starts='):
        opened('images', f'progressive({options})')
