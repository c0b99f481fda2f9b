"""Bytes that an instruction of a scheduled HLO module moves from and to HBM.

Arrays in VMEM do not count; a slice counts only its own bytes.
"""

from __future__ import annotations

import re

from vit_jax.profiling.collectives import KINDS, begins, continues
from vit_jax.profiling.scheduled_hlo import Array, Computation, Instruction, Module

ALIASING = re.compile(r'output_to_operand_aliasing=\{(.*?\))\}')
SLICES = ('slice', 'dynamic-slice', 'gather')
THROUGH = ('bitcast', 'reshape')
UPDATE = 'dynamic-update-slice'
TRANSFERS = ('send', 'recv')  # to and from the host; their results name the operand


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes in one execution."""
    operands = [computation[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode in ('fusion', 'async-start') and instruction.called:
        return _of_fusion(module, operands, instruction)
    if opcode in TRANSFERS:
        return (operands if opcode == 'send' else [instruction])[0].arrays[0].hbm
    results = _results(operands, instruction)
    started = opcode.removesuffix('-start')
    if started == UPDATE:
        return operands[1].arrays[0].hbm + _part(operands[1].arrays[0], of=results[0])
    out = sum(array.hbm for array in results)
    if started in SLICES:
        return out + _part(results[0], of=operands[0].arrays[0])
    return out + sum(_hbm(operand) for operand in operands)


def _results(operands: list[Instruction], instruction: Instruction) -> tuple[Array, ...]:
    """The arrays that an instruction writes.

    The tuple of an asynchronous start also holds its operands and a context. A slice that is read
    asynchronously is an `async-start` that calls it in the schedule, and a `slice-start` after code
    generation: both have the type `((operands), result, context)`.
    """
    arrays, kind = instruction.arrays, instruction.opcode.removesuffix('-start')
    if kind == instruction.opcode or kind == 'all-reduce':
        return arrays
    if kind == 'copy':  # result, operand, context
        return arrays[:1]
    read = sum(len(operand.arrays) for operand in operands)
    return arrays[read : read + (read if kind in KINDS else 1)]


def _of_fusion(module: Module, operands: list[Instruction], outside: Instruction) -> int:
    inside = module.computations[outside.called[0]]
    written, read = _carried(outside)
    reads = sum(
        _hbm(operand) if (part := _part_read(module, inside, parameter)) is None
        else part * (operand.arrays[0].space == 0)
        for i, (parameter, operand) in enumerate(zip(inside.parameters, operands, strict=False))
        if operand.arrays and i not in read
    )  # fmt: skip
    return reads + _written(module, inside, outside, written)


def _part_read(module: Module, inside: Computation, parameter: Instruction) -> int | None:
    """Bytes of a parameter that a fusion, or a nested one, reads; None for all of them."""
    total = 0
    for user in inside.users[parameter.name]:
        if user.opcode in THROUGH or user.opcode == 'fusion':
            for where, name in _names_of(module, inside, user, parameter):
                if (part := _part_read(module, where, name)) is None:
                    return None
                total += part
        elif user.opcode in SLICES and user.operands[0] == parameter.name:
            total += user.arrays[0].size
        elif user.opcode != UPDATE or user.operands[0] != parameter.name:
            return None
    return total


def _names_of(
    module: Module, inside: Computation, user: Instruction, operand: Instruction
) -> list[tuple[Computation, Instruction]]:
    """The instructions that stand for `operand` in its user; parameters of a nested fusion."""
    if user.opcode in THROUGH:
        return [(inside, user)]
    within = module.computations[user.called[0]]
    pairs = zip(within.parameters, user.operands, strict=True)
    return [(within, parameter) for parameter, name in pairs if name == operand.name]


def _carried(fusion: Instruction) -> tuple[set[int], set[int]]:
    """Results and operands of a continuing collective, which were counted at its beginning."""
    match = ALIASING.search(fusion.attributes)
    if match is None or not (begins(fusion) or continues(fusion)):
        return set(), set()
    pairs = re.findall(r'\{(\d*)\}: \((\d+)', match[1])
    results = {int(result or 0) for result, _ in pairs}
    return results, set() if begins(fusion) else {int(operand) for _, operand in pairs}


def _written(module: Module, inside: Computation, outside: Instruction, skipped: set[int]) -> int:
    """Bytes that a fusion writes; of an array that it updates in place, only the update."""
    root = inside.root
    results = [inside[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    arrays = outside.arrays
    if outside.opcode == 'async-start':  # (operands), results, context
        arrays = arrays[len(outside.operands) :][: len(results)]
    if len(results) != len(arrays):
        return sum(a.hbm for i, a in enumerate(arrays) if i not in skipped)
    return sum(
        _size_written(module, inside, result) * (array.space == 0)
        for i, (result, array) in enumerate(zip(results, arrays, strict=True))
        if i not in skipped
    )


def _size_written(module: Module, inside: Computation, result: Instruction) -> int:
    while result.opcode in THROUGH or (result.opcode == 'fusion' and len(result.arrays) == 1):
        if result.opcode == 'fusion':
            inside = module.computations[result.called[0]]
            result = inside.root
        else:
            result = inside[result.operands[0]]
    written = inside[result.operands[1]] if result.opcode == UPDATE else result
    return written.arrays[0].size


def _part(array: Array, of: Array) -> int:
    """Bytes of an array that is part of `of`; 0 if that is not in HBM."""
    return array.size if of.space == 0 else 0


def _hbm(instruction: Instruction) -> int:
    return sum(array.hbm for array in instruction.arrays)
