"""Durations in epochs, examples or per cent, in steps of a run."""

import pytest

from vit_jax.config.run import Durations
from vit_jax.errors import UserError


@pytest.mark.parametrize(
    ('text', 'steps'),
    [
        ('100', 100),
        ('100 steps', 100),
        ('3 epochs', 150),
        ('1 epoch', 50),
        ('0.1 epochs', 5),
        ('1e3 examples', 50),
        ('1 example', 1),
        ('10%', 20),
        ('', 0),
        ('0', 0),
        (40, 40),
    ],
)
def test_durations(text: str | int, steps: int) -> None:
    assert Durations(20, 1000, total_steps=200).steps(text) == steps


@pytest.mark.parametrize(('examples', 'steps'), [(0, 20), (120, 20), (126, 21), (600, 100)])
def test_evaluations_take_at_most_a_tenth_of_the_time(examples: int, steps: int) -> None:
    run = Durations(20, 1000, total_steps=200)
    assert run.between_evals(examples) == steps
    assert steps * 20 >= 10 * examples / 3  # an example costs a third of one that is trained on


def test_epochs_of_batches_that_are_not_equally_full() -> None:
    run = Durations.of('3 epochs', 29_000 / 172, 29_000)
    assert run.total_steps == 3 * 172
    assert run.steps('29000 examples') == 172


def test_the_total_is_no_share_of_itself() -> None:
    with pytest.raises(UserError, match='itself'):
        Durations(20, 1000).steps('5%')
