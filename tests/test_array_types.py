"""Tests check the shapes of annotated arrays, as jaxtyping is installed there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from vit_jax.models import vit
from vit_jax.ops import boxes, terms


def test_a_function_refuses_another_length():
    assert boxes.area(jnp.ones((2, 4))).shape == (2,)
    with pytest.raises(TypeCheckError, match="'boxes'"):
        boxes.area(jnp.ones((2, 3)))


def test_a_function_refuses_another_type():
    with pytest.raises(TypeCheckError, match="'boxes'"):
        boxes.area(jnp.ones((2, 4), int))


def test_arguments_have_to_agree():
    with pytest.raises(TypeCheckError, match="'label'"):
        terms.hits(jnp.zeros((2, 3)), jnp.zeros(4, int))


def test_a_model_refuses_one_image_without_a_batch():
    model = vit.Model(num_classes=3, **vit.variant('mu/16'))
    with pytest.raises(TypeCheckError, match="'images'"):
        model.init(jax.random.key(0), jnp.zeros((32, 32, 3)), train=False)
