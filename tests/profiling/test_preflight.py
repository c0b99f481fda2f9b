"""The search for the largest number that fits."""

import pytest

from vit_jax.profiling.preflight import largest_that_fits


@pytest.mark.parametrize('first', [1, 5, 64])
@pytest.mark.parametrize('bound', [0, 1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize('most', [None, 64, 100])
def test_it_is_found_to_an_eighth(first, bound, most):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= bound

    found = largest_that_fits(fits, first, most)
    best = bound if most is None else min(bound, most)
    assert found <= best <= found + max(found // 8, 1)
    assert (found == 0) == (bound == 0), 'one is found where it fits'
    assert sorted(asked) == sorted(set(asked)), 'each is tried once'
    assert max(asked) <= (most or 2 * max(first, bound))
