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
    case = training.CASES[name]()
    own = training.rounding(case) if case.rounded else {}
    for optimizer, result in training.compare(case).items():
        assert result.is_close(own.get(optimizer))
