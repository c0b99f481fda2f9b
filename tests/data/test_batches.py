"""The shuffle: a permutation of every epoch, the same for ever."""

import numpy as np
import pytest

from vit_jax.data import batches


@pytest.mark.parametrize('size', [*range(1, 70), 255, 256, 257, 5000])
def test_is_a_permutation(size):
    for epoch in range(3):
        indices = batches.shuffled(np.arange(size), size=size, seed=7, epoch=epoch)
        np.testing.assert_array_equal(np.sort(indices), np.arange(size))


def test_any_part_of_an_epoch_is_what_the_whole_has_there():
    whole = batches.shuffled(np.arange(1000), size=1000, seed=1, epoch=2)
    positions = np.array([[3, 999], [500, 0]])
    part = batches.shuffled(positions, size=1000, seed=1, epoch=2)
    np.testing.assert_array_equal(part, whole[positions])


@pytest.mark.slow
@pytest.mark.parametrize('size', [1, 7, batches.PART, batches.PART + 1, 3 * batches.PART])
def test_epochs_follow_one_another_at_any_positions(size):
    positions = np.random.default_rng(0).integers(0, 4 * size, 500)
    one_by_one = [
        batches.shuffled(np.array([at % size]), size=size, seed=3, epoch=at // size)
        for at in positions.tolist()
    ]
    together = batches.shuffled_epochs(positions, size=size, seed=3)
    np.testing.assert_array_equal(together, np.concatenate(one_by_one))


def test_seeds_and_epochs_are_unrelated():
    orders = {
        (seed, epoch): batches.shuffled(np.arange(1000), size=1000, seed=seed, epoch=epoch)
        for seed in range(4)
        for epoch in range(4)
    }
    for a, first in orders.items():
        for b, second in orders.items():
            # Two random permutations agree in one place on average; 9 has probability 1e-6.
            assert a == b or np.sum(first == second) < 9, (a, b)


@pytest.mark.slow
@pytest.mark.parametrize('size', [5, 10])
def test_every_place_is_equally_likely(size):
    epochs = 600
    places = np.stack(
        [batches.shuffled(np.arange(size), size=size, seed=0, epoch=e) for e in range(epochs)]
    )
    counts = np.array([[np.sum(places[:, i] == j) for j in range(size)] for i in range(size)])
    expected = epochs / size
    chi_squared = np.sum((counts - expected) ** 2 / expected)
    freedom = (size - 1) ** 2
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)  # mean and 4 standard deviations


def test_neighbors_do_not_stay_neighbors():
    indices = batches.shuffled(np.arange(10_000), size=10_000, seed=0, epoch=0)
    steps = np.diff(indices)
    assert np.mean(np.abs(steps) == 1) < 0.002
    assert len(np.unique(steps)) > 5000


def test_order_is_fixed_for_ever():
    first = batches.shuffled(np.arange(8), size=50_000, seed=0, epoch=0)
    assert first.tolist() == GOLDEN
    assert first.dtype == np.int64


GOLDEN = [2589, 40089, 43334, 17566, 6912, 40221, 45589, 46528]


def test_huge_sizes_need_no_memory():
    size = 2**40 + 1
    positions = np.array([0, 1, size - 1])
    indices = batches.shuffled(positions, size=size, seed=0, epoch=0)
    assert len(set(indices.tolist())) == 3
    assert (indices >= 0).all()
    assert (indices < size).all()
