"""A loop keeps no arrays of its steps; `tests/bench/memory.py` measures the memory itself."""

import jax
import pytest

from vit_jax.config import load
from vit_jax.trainer import train


@pytest.mark.slow
def test_arrays_do_not_pile_up(repo, tmp_path, one_device):
    config = load.load(
        f'{repo}/tests/helpers/linear.py',
        ['total=50', 'every.log=5', 'every.eval=10', 'every.checkpoint=10'],
    )
    arrays = []

    def report(step, results):
        arrays.append(len(jax.live_arrays()))
        return False

    train.train(config, tmp_path, report=report)
    assert len(arrays) == 5
    # A save that is still being written holds a state: so the least of several counts.
    assert min(arrays[2:]) == min(arrays[:2]), arrays
