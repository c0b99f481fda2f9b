"""Alike blocks are one row, and nothing is lost by it."""

import pytest

from vit_jax.profiling import flops


def row(path, *shape):
    count = 1
    for size in shape:
        count *= size
    return {'path': path, 'shape': list(shape), 'dtype': 'float32', 'count': count}


def blocks(numbers, width=4):
    return [row(f'encoder/block_{i}/{name}', width) for i in numbers for name in ('b', 'k')]


def test_alike_neighbors_are_one():
    folded = flops.fold_repeats([*blocks(range(12)), row('head', 3)])
    assert [(r['path'], r['times'], r['count']) for r in folded] == [
        ('encoder/block_{0..11}/b', 12, 48),
        ('encoder/block_{0..11}/k', 12, 48),
        ('head', 1, 3),
    ]


def test_blocks_within_blocks_multiply():
    rows = [row(f'stage_{s}/unit_{u}/k', 5) for s in range(2) for u in range(3)]
    (folded,) = flops.fold_repeats(rows)
    assert (folded['path'], folded['times']) == ('stage_{0..1}/unit_{0..2}/k', 6)


@pytest.mark.parametrize(
    'rows',
    [
        [*blocks([0]), *blocks([1], width=5)],
        [*blocks([0]), *blocks([2])],
        [row('block_0/b', 4), row('block_1/c', 4)],
        [row('norm1/b', 4), row('norm2/b', 4)],
    ],
)
def test_what_differs_stays(rows):
    folded = flops.fold_repeats(rows)
    assert [r['path'] for r in folded] == [r['path'] for r in rows]
    assert {r['times'] for r in folded} == {1}
