"""Ten steps of an optimizer change a model that was read as they change it in its own code."""

import pytest
from helpers import timm_training, training

ALWAYS = 'DINOv2'


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    'name',
    [n if n == ALWAYS else pytest.param(n, marks=pytest.mark.long) for n in training.CASES],
)
def test_losses_and_parameters_are_those_of_torch(name):
    pytest.importorskip('transformers')
    case = training.CASES[name]()
    own = training.rounding(case) if case.rounded else {}
    for optimizer, result in training.compare(case).items():
        assert result.is_close(own.get(optimizer))


@pytest.mark.parity
@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.long) for name in timm_training.FORMS]
)
def test_losses_and_updates_are_those_of_timm(name):
    for result, own in timm_training.compare(name).values():
        assert result.is_close(own)
