"""Bytes that an instruction of a scheduled HLO module moves from and to HBM.

What lies in VMEM already, or stays there, is not counted; of what is sliced only the slice is.
"""

from __future__ import annotations

import re

from vit_jax.profiling.collectives import begins, continues
from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module

ALIASING = re.compile(r'output_to_operand_aliasing=\{(.*?\))\}')
SLICES = ('slice', 'dynamic-slice', 'gather')
THROUGH = ('bitcast', 'reshape')
UPDATE = 'dynamic-update-slice'


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Read and written by an instruction once."""
    operands = [computation[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode in ('fusion', 'async-start') and instruction.called:
        return _of_fusion(module, operands, instruction)
    if opcode == UPDATE:
        return _hbm(operands[1]) + _hbm(operands[1], of=instruction)
    written = instruction.arrays[:1] if opcode.endswith('-start') else instruction.arrays
    out = sum(array.hbm for array in written)
    if opcode in SLICES:
        return out + _hbm(instruction, of=operands[0])
    return out + sum(_hbm(operand) for operand in operands)


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
    """Bytes of a parameter that a fusion, or one within it, reads; None for all of them."""
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
    """What a user calls its operand: itself, or parameters where it is a fusion within a fusion."""
    if user.opcode in THROUGH:
        return [(inside, user)]
    within = module.computations[user.called[0]]
    pairs = zip(within.parameters, user.operands, strict=True)
    return [(within, parameter) for parameter, name in pairs if name == operand.name]


def _carried(fusion: Instruction) -> tuple[set[int], set[int]]:
    """Results and operands of an exchange that goes on, which were counted where it began."""
    match = ALIASING.search(fusion.attributes)
    if match is None or not (begins(fusion) or continues(fusion)):
        return set(), set()
    pairs = re.findall(r'\{(\d*)\}: \((\d+)', match[1])
    results = {int(result or 0) for result, _ in pairs}
    return results, set() if begins(fusion) else {int(operand) for _, operand in pairs}


def _written(module: Module, inside: Computation, outside: Instruction, skipped: set[int]) -> int:
    """Bytes that a fusion writes; in place of an array that it updates, the update."""
    root = inside.root
    results = [inside[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    if outside.opcode == 'async-start':  # (what is read), what is written, context
        return sum(array.hbm for array in outside.arrays[len(outside.operands) :][: len(results)])
    if len(results) != len(outside.arrays):
        return sum(a.hbm for i, a in enumerate(outside.arrays) if i not in skipped)
    return sum(
        _size_written(module, inside, result) * (array.space == 0)
        for i, (result, array) in enumerate(zip(results, outside.arrays, strict=True))
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


def _hbm(instruction: Instruction, of: Instruction | None = None) -> int:
    """Bytes of a result, if it, or that which it is a part of, lies in HBM."""
    if of is not None:
        return instruction.arrays[0].size if of.arrays[0].space == 0 else 0
    return sum(array.hbm for array in instruction.arrays)
