"""FLOPs of matrix products and convolutions in a scheduled HLO module, exactly.

A matrix product is a convolution here: its batch is a spatial dimension, dilated so that every
output meets one input. The count is the number of pairs of positions that meet.
"""

from __future__ import annotations

import functools
import math
import re

from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module

LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
ESTIMATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}')


def flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """FLOPs of an instruction and of all that it calls, each once."""
    if instruction.opcode == 'convolution':
        return _convolution(computation, instruction)
    if instruction.opcode == 'dot':
        match = CONTRACTED.search(instruction.attributes)
        lhs = computation[instruction.operands[0]].arrays[0].shape
        terms = math.prod(lhs[int(i)] for i in (match[1] if match else '').split(',') if i)
        return 2 * math.prod(instruction.arrays[0].shape) * terms
    if instruction.opcode == 'custom-call':  # a kernel, which declares its FLOPs itself
        match = ESTIMATED.search(instruction.attributes)
        return int(match[1]) if match else 0
    return sum(
        flops(module, called, inner)
        for called in map(module.computations.__getitem__, instruction.called)
        for inner in called
    )


def _convolution(computation: Computation, instruction: Instruction) -> int:
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(f'{instruction.name}: a convolution without dim_labels')
    left, right, out = labels.groups()
    lhs, rhs = (computation[name].arrays[0].shape for name in instruction.operands[:2])
    result = instruction.arrays[0].shape
    window = _window(instruction.attributes)
    terms = rhs[right.index('i')]
    for axis in (c for c in out if c.isdigit()):
        steps = {key: values[int(axis)] for key, values in window.items()}
        terms *= _meetings(lhs[left.index(axis)], result[out.index(axis)], **steps)
    return 2 * result[out.index('b')] * result[out.index('f')] * terms


def _window(attributes: str) -> dict[str, list[int]]:
    """The parameters of a window for every spatial dimension, with defaults."""
    match = re.search(r'window=\{([^}]*)\}', attributes)
    given = dict(re.findall(r'(\w+)=(\S+)', match[1] if match else ''))
    size = [int(n) for n in given['size'].split('x')] if given else []
    pads = given.get('pad', 'x'.join(['0_0'] * len(size)))
    found = {'size': size, 'low': [int(pad.split('_')[0]) for pad in pads.split('x') if pad]}
    for key in ('stride', 'lhs_dilate', 'rhs_dilate'):
        text = given.get(key)
        found[key] = [int(n) for n in text.split('x')] if text else [1] * len(size)
    return found


@functools.cache
def _meetings(
    length: int, outputs: int, size: int, low: int, stride: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Number of pairs (output, window position) that read an input and not padding."""
    last = (length - 1) * lhs_dilate
    return sum(
        0 <= (at := out * stride + place * rhs_dilate - low) <= last and at % lhs_dilate == 0
        for out in range(outputs)
        for place in range(size)
    )
