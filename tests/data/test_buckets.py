"""Batches of sequences: every example once an epoch, whatever the process or the bucket."""

import itertools
import pickle

import numpy as np
import pytest
from helpers import loading
from helpers.messages import says

from vit_jax.data import vocabulary
from vit_jax.data.plans.buckets import ROWS
from vit_jax.data.records import BrokenRecord, SourceInfo
from vit_jax.data.sources import open_source
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError

PLAIN = parse_transforms('')
BOUNDS = (4, 8, 16)
BATCH = 16 * 16  # tokens: 64, 32 and 16 rows


class Sequences:
    """Record i has a source of lengths[i] tokens i + 1 and a target of half of them."""

    info = SourceInfo(0, (), vocab_size=2001)

    def __init__(self, lengths, broken=()):
        self.lengths, self.broken, self.reads = lengths, broken, 0

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.reads += 1
        if index in self.broken:
            raise BrokenRecord(f'number {index}: torn')
        source = np.full(self.lengths[index], index + 1)
        return {'source': source, 'target': source[: (len(source) + 1) // 2]}

    def labels(self):
        raise AssertionError('text has no classes')

    def record_name(self, index):
        return f'number {index}'


def numbers(lengths=None, **options):
    lengths = np.random.default_rng(0).integers(1, 17, 400) if lengths is None else lengths
    return Subset('numbers', [(Sequences(lengths, **options), np.arange(len(lengths)))])


def opened(source, transforms=PLAIN, **options):
    options = {'batch_size': BATCH, 'seed': 3, 'threads': 2, 'buckets': BOUNDS} | options
    return loading.open_as_dataset(source, transforms, plan='buckets', **options)


def take(source, n, start_step=0, **options):
    batches = opened(source, **options).train_batches(start_step)
    taken = list(itertools.islice(batches, n))
    batches.close()
    return taken


def evaluate(source, **options):
    return list(opened(source, **options).eval_batches())


def steps(source):
    return epoch_of(source).steps


def epoch_of(source, batch_size=BATCH):
    return opened(source, batch_size=batch_size).plan.epoch


def lengths_of(source):
    return opened(source).plan.longest


def indices(batches):
    return np.concatenate([batch['index'][batch['mask'] == 1] for batch in batches])


def assert_equal(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


# -- training ------------------------------------------------------------------------------------


def test_arrays():
    source = numbers()
    shapes = set()
    for batch in take(source, steps(source)):
        rows, length = batch['source'].shape
        shapes.add((rows, length))
        assert batch['target'].shape == (rows, length)
        assert {k: v.dtype.name for k, v in batch.items()} == {
            'source': 'int32',
            'target': 'int32',
            'index': 'int32',
            'mask': 'float32',
        }
    assert shapes == {(64, 4), (32, 8), (16, 16)}
    assert all(rows * length == BATCH for rows, length in shapes)


def test_rows_hold_their_example_and_padding():
    source = numbers()
    for batch in take(source, steps(source)):
        for row, (index, mask) in enumerate(zip(batch['index'], batch['mask'], strict=True)):
            for name in ('source', 'target'):
                expected = source[index][name] if mask else []
                padded = np.pad(expected, (0, batch[name].shape[1] - len(expected)))
                np.testing.assert_array_equal(batch[name][row], padded)


def test_an_example_is_in_the_shortest_bucket_that_holds_it():
    source = numbers()
    lengths = lengths_of(source)
    lows = dict(zip(BOUNDS, (0, *BOUNDS[:-1]), strict=True))
    for batch in take(source, steps(source)):
        length = batch['source'].shape[1]
        own = lengths[batch['index'][batch['mask'] == 1]]
        assert own.max() <= length
        assert own.min() > lows[length]


@pytest.mark.parametrize('size', [1, 15, 16, 400])
def test_every_epoch_is_a_permutation_in_the_same_number_of_steps(size):
    lengths = np.random.default_rng(1).integers(1, 17, size)
    source = numbers(lengths)
    n = steps(source)
    rows = {4: 64, 8: 32, 16: 16}
    counts = np.bincount(np.searchsorted(BOUNDS, lengths), minlength=3)
    assert n == sum(-(-c // r) for c, r in zip(counts, rows.values(), strict=True))
    batches = take(source, 3 * n)
    epochs = [indices(batches[i * n : (i + 1) * n]) for i in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    if size == 400:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[1], epochs[2])


def test_batches_of_all_buckets_are_mixed():
    source = numbers(np.random.default_rng(0).integers(1, 17, 2000))
    lengths = [batch['source'].shape[1] for batch in take(source, steps(source))]
    assert sum(a != b for a, b in itertools.pairwise(lengths)) > len(lengths) / 4


def test_only_the_last_batch_of_a_bucket_is_filled_up():
    source = numbers()
    plan = epoch_of(source)
    free = dict.fromkeys(BOUNDS, 0)
    for batch in take(source, plan.steps):
        mask = batch['mask']
        assert not (np.diff(mask) > 0).any()
        free[batch['source'].shape[1]] += int((mask == 0).sum())
    for bound, rows, members in zip(BOUNDS, plan.rows, plan.members, strict=True):
        assert free[bound] == -len(members) % rows


def test_seeds_differ():
    one, other = (indices(take(numbers(), 6, seed=seed)) for seed in (3, 4))
    assert not np.array_equal(one[:50], other[:50])


@pytest.mark.parametrize('start', [1, 7, 19, 20, 21, 45])
def test_resumed_is_continued(start):
    source = numbers()
    whole = take(source, start + 4)
    assert_equal(take(source, 4, start_step=start), whole[start:])


@pytest.mark.parametrize('processes', [2, 4])
def test_processes_together_see_the_global_batch(processes):
    source = numbers()
    n = steps(source) + 3
    parts = [take(source, n, process_index=p, process_count=processes) for p in range(processes)]
    together = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(together, take(source, n))


def test_how_it_is_read_does_not_show():
    expected = take(numbers(), 30)
    assert_equal(take(numbers(), 30, threads=0), expected)
    assert_equal(take(numbers(), 30, threads=5, cache=True), expected)


@pytest.mark.slow
@pytest.mark.long
def test_worker_processes_do_not_show():
    source = open_source('synthetic:copy', 'train[:200]')
    some = take(source, 3, buckets=(8, 16), workers=1, threads=1, start_step=2)
    assert_equal(some, take(source, 5, buckets=(8, 16))[2:])


def test_cache_reads_each_record_once():
    sentences = Sequences(np.random.default_rng(0).integers(1, 17, 400))
    take(Subset('numbers', [(sentences, np.arange(400))]), 30, cache=True)
    assert sentences.reads == 400


def test_examples_beyond_the_last_bucket_are_left_out_of_training():
    source = numbers([3, 17, 5, 16, 40])
    data = opened(source)
    assert data.num_examples == 3
    assert says(data.plan.notes, '2 examples')
    np.testing.assert_array_equal(np.sort(indices(take(source, 3))), [0, 2, 3])


def test_what_an_epoch_is_made_of():
    source = numbers()
    data = opened(source)
    batches = take(source, steps(source))
    assert data.plan.examples_per_step * len(batches) == pytest.approx(data.num_examples)
    rows = np.mean([len(batch['mask']) for batch in batches])
    assert sum(shape.rows * shape.share for shape in data.shapes) == pytest.approx(rows)
    assert [shape.spec['source'].shape for shape in data.shapes] == [(4,), (8,), (16,)]


def test_sentences_and_tokens_are_counted_without_padding():
    data = opened(numbers(), process_count=2)
    batch = {'target': np.array([[5, 6, 2], [7, 2, 0], [0, 0, 0]]), 'mask': np.array([1, 1, 0])}
    assert data.count(batch) == {'sentences': 4, 'tokens': 10}


def test_rows_are_a_multiple_that_devices_share():
    assert epoch_of(numbers(), BATCH + 100).rows == (88, 40, 16)
    assert all(rows % ROWS == 0 for rows in epoch_of(numbers(), 1000).rows)


# -- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize('processes', [1, 2])
@pytest.mark.parametrize('multiple', [2, 8])
def test_evaluation_has_every_example_once(processes, multiple):
    lengths = [*np.random.default_rng(0).integers(1, 17, 150), 40, 17]
    parts = [
        evaluate(
            numbers(lengths),
            batch_size=64,
            multiple=multiple,
            process_index=p,
            process_count=processes,
        )
        for p in range(processes)
    ]
    together = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert all(len(batch['mask']) % multiple == 0 for batch in together)
    assert together[-1]['source'].shape[1] == 40
    np.testing.assert_array_equal(np.sort(indices(together)), np.arange(152))
    ids = np.concatenate([batch['source'][batch['mask'] == 1, 0] for batch in together])
    np.testing.assert_array_equal(ids, indices(together) + 1)


def test_evaluation_takes_no_more_rows_than_needed():
    source = numbers([3, 3, 3])
    (batch,) = evaluate(source, multiple=2)
    assert batch['source'].shape == (4, 4)


def test_broken_records_are_in_no_batch():
    source = numbers([3] * 20, broken=(2, 7))
    np.testing.assert_array_equal(np.setdiff1d(np.arange(20), indices(take(source, 1))), [2, 7])
    batches = evaluate(source)
    np.testing.assert_array_equal(np.setdiff1d(np.arange(20), indices(batches)), [2, 7])


# -- text and mistakes ---------------------------------------------------------------------------


@pytest.fixture(scope='module')
def vocab():
    return vocabulary.train(['Ein Mann fährt Rad', 'a man rides'] * 50, 40, 'bpe')


def text(tmp_path):
    (tmp_path / 'p.tsv').write_text('A man\tEin Mann\na bike\tEin Rad\n')
    return open_source(f'text:{tmp_path}/p.tsv', 'train')


def test_tokenize_ends_every_sentence(tmp_path, vocab):
    data = opened(text(tmp_path), parse_transforms('tokenize', vocab), buckets=(32,))
    record = data.read(0)
    assert record['target'].tolist() == [*vocab.encode('Ein Mann'), vocabulary.EOS]
    assert record['source'].dtype == np.int32
    assert data.info.vocab_size == 40


def test_tokenize_cuts_and_still_ends(tmp_path, vocab):
    apply = parse_transforms('tokenize(max_len=3)', vocab)
    record = apply(text(tmp_path)[0], None)
    assert record['target'].tolist() == [*vocab.encode('Ein Mann')[:2], vocabulary.EOS]


def test_lower_and_swap(tmp_path):
    record = parse_transforms('swap|lower')(text(tmp_path)[0], None)
    assert record == {'source': 'ein mann', 'target': 'a man'}


def test_transforms_take_their_vocabulary_to_other_processes(tmp_path, vocab):
    data = opened(text(tmp_path), parse_transforms('lower|tokenize', vocab), buckets=(32,))
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(copy.read(1)['source'], data.read(1)['source'])


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('tokenize', r"'tokenize': .*config\.data\.vocab"),
        ('lower', r"p\.tsv line 1: 'source' .* 'tokenize'"),
        ('flip', "transforms 'flip'"),
    ],
)
def test_transforms_that_make_no_sequences(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        opened(text(tmp_path), parse_transforms(spec), buckets=(32,))


def test_text_without_buckets_says_what_to_set(tmp_path):
    with pytest.raises(UserError, match=r"'source' .*config\.data\.buckets=\(16, 32, 64\)"):
        loading.open_as_dataset(text(tmp_path), PLAIN, batch_size=1).shapes  # noqa: B018
    source = open_source('synthetic:copy', 'train')
    with pytest.raises(UserError, match=r'set config\.data\.buckets'):
        list(itertools.islice(loading.train_batches(source, PLAIN, batch_size=8, seed=0), 1))


@pytest.mark.parametrize('bounds', [(), (8, 4), (4, 4), (0, 4), (4.5,)])
def test_bounds_grow(bounds):
    with pytest.raises(UserError, match='buckets='):
        opened(open_source('synthetic:copy', 'train[:9]'), buckets=bounds)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'batch_size': 127}, r'batch_size=127: .* 8 .* 16'),
        ({'seed': -1}, 'seed=-1'),
        ({'process_count': 3}, 'divide into the 3 equal parts'),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        take(numbers(), 1, **options)


def test_only_long_examples():
    with pytest.raises(UserError, match=r'numbers.*16 tokens'):
        take(numbers([20, 30]), 1)


class Odd(Sequences):
    """Record 2 has an id of its own."""

    def __init__(self, number, vocab_size):
        super().__init__([3, 3, 3, 3])
        self.number, self.info = number, SourceInfo(0, (), vocab_size)

    def __getitem__(self, index):
        return {'source': np.full(3, self.number if index == 2 else 1, np.int64)}


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ('number', 'vocab_size', 'bounds'),
    [(-1, 9, r'0\.\.8'), (9, 9, r'0\.\.8'), (-1, 0, r'0\.\.2147483647'), (2**32 + 5, 9, r'0\.\.8')],
)
def test_an_id_out_of_range_names_the_record(number, vocab_size, bounds):
    source = Subset('odd', [(Odd(number, vocab_size), np.arange(4))])
    said = rf"number 2: 'source'.* {number}.* {bounds}"
    with pytest.raises(UserError, match=said):
        opened(source)
    assert vocab_size == 0 or opened(Subset('even', [(Odd(8, vocab_size), np.arange(4))]))


def test_a_source_that_does_not_tell_its_vocabulary_has_the_ids_that_it_has():
    source = Subset('odd', [(Odd(41, 0), np.arange(4))])
    assert opened(source).info.vocab_size == 42


def test_batches_may_hold_so_many_tokens_of_the_target():
    """Targets are half as long as sources, so that most of a padded batch is empty."""
    source = numbers(np.random.default_rng(0).integers(1, 17, 2_000))
    padded, counted = (opened(source, batch_size=600, count=it) for it in ('padded', 'target'))
    assert padded.plan.tokens_per_step < 0.5 * 600
    # The last batch of each bucket is not full.
    assert 0.85 * 600 < counted.plan.tokens_per_step < 1.03 * 600
    epoch, targets = counted.plan.epoch, counted.plan.targets
    for rows, members in zip(epoch.rows, epoch.members, strict=True):
        mean = targets[members].mean()
        assert rows % ROWS == 0
        assert abs(rows * mean - 600) <= mean * ROWS / 2
    assert counted.num_examples == len(source)


def test_what_a_batch_counts_is_one_of_two():
    with pytest.raises(UserError, match="unknown count 'tokens'"):
        opened(numbers(), count='tokens')
