"""What is read out of a signature."""

from __future__ import annotations

import typing

import pytest

from vit_jax import signatures

if typing.TYPE_CHECKING:
    from decimal import Decimal


class Clock:
    """Has annotations of every kind."""

    def __init__(self, given: Decimal, *, every: int | None = None, size: int = 3):
        pass


def test_annotations_are_evaluated_as_far_as_they_can_be():
    found = {name: p.annotation for name, p in signatures.parameters(Clock).items()}
    assert found == {'given': typing.Any, 'every': int | None, 'size': int}


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
