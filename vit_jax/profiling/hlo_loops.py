"""Trip counts of loops in a scheduled HLO module."""

from __future__ import annotations

import re

from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module

KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
PART = re.compile(r'\b(condition|body)=%([\w.\-]+)')
INDEX = re.compile(r'index=(\d+)')


def trips(module: Module, outside: Computation, loop: Instruction) -> int:
    """The trip count of a `while`, from the compiler or else from its counter; 1 if unclear.

    A counter is an element of the loop's carried tuple that is compared to a constant.
    """
    if match := KNOWN.search(loop.attributes):
        return int(match[1])
    parts = {part: module.computations[name] for part, name in PART.findall(loop.attributes)}
    condition, body = parts['condition'], parts['body']
    compared = [_source(condition, name) for name in condition.root.operands]
    if condition.root.opcode != 'compare' or 'direction=LT' not in condition.root.attributes:
        return 1
    counter, limit = compared
    if counter.opcode != 'get-tuple-element' or limit.opcode != 'constant':
        return 1
    index = int(INDEX.search(counter.attributes)[1])  # type: ignore[index]
    carried = _source(outside, loop.operands[0])
    start = _constant(outside, carried.operands[index]) if carried.opcode == 'tuple' else None
    step = _step(body, _source(body, body.root.operands[index]))
    return -(-(int(limit.text) - (start or 0)) // step)


def _step(body: Computation, counted: Instruction) -> int:
    """The increment of a counter, 1 if unclear."""
    added = [_constant(body, name) for name in counted.operands] if counted.opcode == 'add' else []
    return next((n for n in added if n), 1)


def _constant(computation: Computation, name: str) -> int | None:
    found = _source(computation, name)
    return int(found.text) if found.opcode == 'constant' and found.text.isdigit() else None


def _source(computation: Computation, name: str) -> Instruction:
    """The original of an instruction that may be a copy."""
    found = computation[name]
    while found.opcode in ('copy', 'bitcast', 'copy-done', 'copy-start'):
        found = computation[found.operands[0]]
    return found
