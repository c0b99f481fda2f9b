"""Plans, one module each: the assignment of examples to batches, and the batches' shapes.

`config.data.buckets` selects `buckets`, `config.data.sizes` selects `sizes`; the default is
`fixed`. A custom plan is a module with a class `Plan` derived from `plans.base.Plan`, with
keyword-only options; set `config.data.plan='my_lab.packing(length=256)'`.
"""

from __future__ import annotations

import inspect
from typing import Any

from vit_jax import signatures
from vit_jax.data.plans.base import Examples, Plan
from vit_jax.errors import UserError, resolve

__all__ = ['Plan', 'make']


def make_plan(text: str, examples: Examples, **options: Any) -> Plan:
    """Make the plan named by a text such as 'my_lab.packing(length=256)'.

    Args:
      text: Module name, with options of its plan.
      examples: Examples to batch.
      options: Further keywords of the plan, such as `batch_size` and `seed`.

    Raises:
      UserError: if the plan does not exist, or refuses the options or the examples.
    """
    node = signatures.parse_call(text, f'plan {text!r}')
    args, named = signatures.arguments(node)
    cls = resolve('vit_jax.data.plans', signatures.function_name(node), 'Plan')
    if not (isinstance(cls, type) and issubclass(cls, Plan)):
        raise UserError(f'plan {text!r}: its class Plan must derive from {Plan.__module__}.Plan')
    if args:
        raise UserError(f'plan {text!r}: write its options as NAME=VALUE')
    try:
        inspect.signature(cls).bind(examples, **options, **named)
    except TypeError as error:
        raise UserError(f'plan {text!r}: {error}') from error
    return cls(examples, **options, **named)
