"""Ten steps of an optimizer change a model that was read as they change it in its own code."""

import pytest
from helpers import training

pytest.importorskip('torch')
pytest.importorskip('transformers')
FEW = ('DINOv2', 'CLIP, texts')


@pytest.mark.parity
@pytest.mark.parametrize(
    'name',
    [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in training.CASES],
)
def test_losses_and_parameters_are_those_of_torch(name):
    for result in training.compare(training.CASES[name]()).values():
        assert result.loss < 1e-4
        assert result.params < 1e-3
