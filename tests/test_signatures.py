"""What is read out of a signature."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import pytest

from vit_jax import signatures
from vit_jax.signatures import Duration, Steps

if typing.TYPE_CHECKING:
    from decimal import Decimal


class Clock:
    """Has every kind of duration."""

    def __init__(
        self,
        given: Decimal,
        *,
        first: Steps = 0,
        every: Steps | None = None,
        marks: Sequence[Steps] = (),
        text: Duration = '1%',
        size: int = 3,
    ):
        pass


def test_annotations_are_evaluated_as_far_as_they_can_be():
    found = {name: p.annotation for name, p in signatures.parameters(Clock).items()}
    assert found['given'] is typing.Any
    assert found['size'] is int
    assert found['every'] == Steps | None


def test_the_parameters_after_the_star():
    assert list(signatures.keyword_only(Clock)) == ['first', 'every', 'marks', 'text', 'size']


def test_durations_are_told_from_other_numbers():
    found = {name: p.annotation for name, p in signatures.parameters(Clock).items()}
    assert {n for n, a in found.items() if signatures.is_duration(a)} == {'first', 'every', 'text'}
    assert {n for n, a in found.items() if signatures.are_durations(a)} == {'marks'}


def test_durations_in_steps():
    keywords = {'first': '5%', 'marks': ('1%', 7), 'size': 4}
    steps = signatures.in_steps(Clock, keywords, lambda text: int(text.removesuffix('%')) * 10)
    assert steps == {'first': 50, 'marks': (10, 70), 'size': 4}


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('folder:a*0.7+folder:b*0.3', [('folder:a', 0.7), ('folder:b', 0.3)]),
        ('a*1+b:x+y*2+c*3.5', [('a', 1), ('b:x+y', 2), ('c', 3.5)]),
        (
            'folder:/data/{label}_*.jpg*2+digits*1',
            [('folder:/data/{label}_*.jpg', 2), ('digits', 1)],
        ),
        ('folder:a*0.7', [('folder:a*0.7', 1)]),
        ('folder:a+folder:b', [('folder:a+folder:b', 1)]),
        ('folder:a*0.7+folder:b', [('folder:a*0.7+folder:b', 1)]),
        ('', [('', 1)]),
    ],
)
def test_sources_of_a_mixture(text, found):
    assert signatures.parse_sources(text) == found
