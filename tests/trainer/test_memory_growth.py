"""A loop keeps no arrays of its steps; `tests/bench/memory.py` measures the memory itself."""

import time

import jax
import pytest

from vit_jax.config import load
from vit_jax.trainer import train

SETTLE_SECONDS = 30


@pytest.mark.slow
def test_arrays_do_not_pile_up(repo, tmp_path, one_device):
    config = load.load(
        f'{repo}/tests/helpers/linear.py',
        ['total=50', 'every.log=5', 'every.eval=10', 'every.checkpoint=10'],
    )
    arrays = []

    def report(step, results):
        settled = time.monotonic() + SETTLE_SECONDS
        while arrays and len(jax.live_arrays()) != arrays[0] and time.monotonic() < settled:
            time.sleep(0.05)  # a save that is being written holds a state
        arrays.append(len(jax.live_arrays()))
        return False

    train.train(config, tmp_path, report=report)
    assert len(arrays) == 5
    assert len(set(arrays)) == 1, arrays
