"""What the tests of runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vit_jax.trainer import build

# What a run computes hangs on these sections, on the shapes of its batches and on its length.
COMPUTED = ('seed', 'batch_size', 'model', 'task', 'optim', 'step')


@pytest.fixture(scope='module')
def compiled_once() -> Iterator[None]:
    """Runs of a module that compute the same share their program, also if they stop and go on."""
    make, made = build.make_program, {}

    def once(config, shapes, layout, times):
        sections = {name: str(config[name]) for name in COMPUTED}
        key = (str(sections), str(shapes), times, layout)
        if key not in made:
            made[key] = make(config, shapes, layout, times)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, 'make_program', once)
        yield
