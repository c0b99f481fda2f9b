"""Shared helpers of tests."""

from helpers import typechecker

__all__ = ['typechecker']  # jaxtyping looks it up as an attribute
