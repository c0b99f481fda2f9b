"""Which values a parameter may be given, by its annotation or else by its default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from helpers.messages import mentions

from vit_jax import signatures
from vit_jax.config import schema
from vit_jax.config.run import Duration
from vit_jax.errors import UserError


def example(
    number: float,
    size: int | None,
    pair: tuple[float, float],
    some: Sequence[Duration],
    group: Mapping[str, Any],
    steps: Duration = 0,
    rate: float | Callable = 0.5,
    dtype: Any | None = None,
    plain=True,
):
    """Has every kind of annotation."""


PARAMETERS = signatures.parameters(example)
NONE = type(None)


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('number', (float,)),
        ('size', (int, NONE)),
        ('pair', (tuple,)),
        ('some', (tuple,)),
        ('group', (dict,)),
        ('steps', (str, int)),
        ('rate', (float,)),
        ('dtype', ()),
        ('plain', (bool,)),
    ],
)
def test_kinds(name: str, expected: tuple[type, ...]) -> None:
    assert schema.accepted_types(PARAMETERS[name]) == expected


@pytest.mark.parametrize(
    ('name', 'value'),
    [('number', 1), ('size', None), ('pair', [0, 1]), ('steps', 5), ('steps', '5%'), ('dtype', 3)],
)
def test_values_that_fit(name: str, value: Any) -> None:
    schema.check_value(PARAMETERS[name], value, name)


@pytest.mark.parametrize(
    ('name', 'value', 'words'),
    [
        ('number', '1', "x='1': expected float"),
        ('size', 1.5, ('x=1.5', 'None')),
        ('pair', 1.0, 'expected tuple'),
        ('group', 1, ('x=1', 'group')),
        ('steps', 'now', 'write '),
        ('some', ('5%', 'now'), "x='now': write "),
    ],
)
def test_values_that_do_not_fit(name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        schema.check_value(PARAMETERS[name], value, 'x')
    assert mentions(str(error.value), words)


@pytest.mark.parametrize(
    ('text', 'kinds', 'value'),
    [
        ('1e3', (int,), 1000),
        ('1', (float,), 1.0),
        ('None', (float, NONE), None),
        ('None', (str,), 'None'),
        ('TRUE', (bool,), True),
        ('[1, 2]', (tuple,), (1, 2)),
        ('bfloat16', (), 'bfloat16'),
        ('7', (), 7),
    ],
)
def test_text(text: str, kinds: tuple[type, ...], value: Any) -> None:
    parsed = schema.parse_value(text, kinds)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ('text', 'kinds'),
    [('1.5', (int,)), ('None', (int,)), ('maybe', (bool,)), ('abc', (tuple,)), ('3', (tuple,))],
)
def test_text_of_another_type(text: str, kinds: tuple[type, ...]) -> None:
    with pytest.raises(ValueError, match=text):
        schema.parse_value(text, kinds)
