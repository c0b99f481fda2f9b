"""Roofline of a scheduled program: cost and minimum time of every operation on a chip.

An operation takes at least FLOPs / peak, and at least bytes / bandwidth, where bytes are its HBM
traffic (Williams et al. 2009, "Roofline"). The bound ignores gaps between operations, and matrices
that do not fill the matrix units.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vit_jax.profiling.hlo import (
    Array,
    Computation,
    Instruction,
    Module,
    instruction_flops,
    trip_count,
)
from vit_jax.profiling.topology import Chip

ALIASING = re.compile(r'output_to_operand_aliasing=\{(.*?\))\}')
SLICES = ('slice', 'dynamic-slice', 'gather')
THROUGH = ('bitcast', 'reshape')
UPDATE = 'dynamic-update-slice'
TRANSFERS = ('send', 'recv')  # to and from the host; their results name the operand
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# These move no data: they name existing arrays, or do nothing at run time.
FREE = frozenset((
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
    *('after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain'),
))  # fmt: skip
# Nor do these: memory that a loop will write into, and a concatenation of adjacent parts.
LIBRARIES = ('__cublas$', '__cudnn$')
# Collectives of GPUs have a start and an end even where nothing runs in between.
SYNCHRONOUS = '"is_sync":true'
UNMOVED = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')
_WRAPPERS = frozenset((
    *('checkpoint', 'rematted_computation', 'closed_call'),
    *('while', 'body', 'body_pred', 'cond', 'branch', 'shard_map'),
))  # fmt: skip
MESH = re.compile(
    r'replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}'
)
PERMUTED = re.compile(r'\[([\d,]+)\]T\(([\d,]+)\)')
SUBAXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
LISTED = re.compile(r'(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}')
COMPACT = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      kind: One of `KINDS`.
      size: Bytes of the whole array that a chip sends or receives, whichever is larger.
      groups: Communicating chips, by their indices in the mesh.
    """

    kind: str
    size: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> float:
        """Minimum number of bytes that a chip sends, around a ring."""
        chips = max(map(len, self.groups), default=1)
        if self.kind == 'collective-permute':
            return self.size
        return (2 if self.kind == 'all-reduce' else 1) * self.size * (chips - 1) / chips

    def axis(self, mesh: Mapping[str, int]) -> str:
        """Return the mesh axes that it spans, such as `data` or `data+fsdp`; may be empty.

        Args:
          mesh: {axis: size}, in the order of chip numbers.
        """
        indices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        moved = set()
        for group in self.groups:
            positions = np.argwhere(np.isin(indices, group))
            moved |= {name for i, name in enumerate(mesh) if len(set(positions[:, i])) > 1}
        return '+'.join(name for name in mesh if name in moved)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the schedule with all its repetitions.

    Attributes:
      path: Path of its Flax module, see `module_path`.
      kind: Opcode.
      flops, bytes: FLOPs and HBM bytes of one repetition on one chip.
      count: Repetitions in loops.
      asynchronous: Whether it overlaps with other operations.
      collective: Exchange with other chips, if any.
      cycles: Compiler's estimate for one repetition, if known.
    """

    path: str
    kind: str
    flops: int
    bytes: int
    count: int
    asynchronous: bool = False
    collective: Collective | None = None
    cycles: int | None = None

    def seconds(self, chip: Chip) -> float:
        """Return the minimum time of all repetitions."""
        return self.count * max(self.flops / chip.peak, self.bytes / chip.bandwidth)


def operations(module: Module) -> list[Operation]:
    """List the operations of the schedule, except those that cost nothing."""
    return list(_walk(module, module.entry, 1))


def _walk(
    module: Module, computation: Computation, count: int, asynchronous: bool = False
) -> Iterator[Operation]:
    for instruction in computation:
        yield from expand(module, computation, instruction, count, asynchronous)


def expand(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    count: int = 1,
    asynchronous: bool = False,
) -> Iterator[Operation]:
    """Yield the operations of an instruction; in a loop, `count` times its trip count."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(('-done', '-update')) or ends_collective(instruction):
        return
    if any(target in instruction.attributes for target in UNMOVED):
        return
    called = [module.computations[name] for name in instruction.called]
    if opcode == 'while':
        repeated = count * trip_count(module, computation, instruction)
        yield from _walk(module, called[0], repeated)
    elif opcode == 'conditional':
        branches = [list(_walk(module, branch, count)) for branch in called]
        yield from max(branches, key=lambda ops: sum(op.flops + op.bytes for op in ops))
    elif opcode == 'call':
        yield from _walk(module, called[0], count, asynchronous)
    else:
        yield operation(module, computation, instruction, count, asynchronous)


def operation(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    count: int = 1,
    asynchronous: bool = False,
) -> Operation:
    """Describe an instruction that runs `count` times, with its FLOPs and bytes."""
    opcode = instruction.opcode
    started = opcode.endswith('-start') or opcode in TRANSFERS or begins_collective(instruction)
    return Operation(
        path=module_path(_op_name(module, instruction)) or instruction.opcode,
        kind=instruction.opcode,
        flops=instruction_flops(module, computation, instruction),
        bytes=bytes_moved(module, computation, instruction),
        count=count,
        asynchronous=asynchronous or (started and SYNCHRONOUS not in instruction.attributes),
        collective=collective(module, computation, instruction),
        cycles=instruction.cycles,
    )


def _op_name(module: Module, instruction: Instruction) -> str:
    """Return the name of an instruction, or of the last named one inside."""
    if instruction.op_name or not instruction.called:
        return instruction.op_name
    names = [i.op_name for name in instruction.called for i in module.computations[name]]
    return next((name for name in reversed(names) if name), '')


def module_path(op_name: str) -> str:
    """Return module and direction of an operation, such as `encoder/block_*/mlp, backward`.

    JAX names it `jit(train_step)/transpose(jvp(Model))/encoder/block_6/mlp/dot_general`. Numbers of
    blocks are dropped; operations outside of any module are the `update`.
    """
    if not op_name:
        return ''
    *parts, _ = op_name.split('/')
    direction = 'backward' if 'transpose(' in op_name else 'forward' if 'jvp(' in op_name else ''
    plain = [p for p in parts if re.fullmatch(r'[a-z]\w*', p) and p not in _WRAPPERS]
    path = '/'.join(re.sub(r'_\d+$', '_*', part) for part in plain[:4])
    if not direction:
        return path or 'update'
    return f'{path or "model"}, {direction}'


def bound(operations: Sequence[Operation], chip: Chip) -> float:
    """Compute a lower bound on the seconds of a step.

    The maximum of three times: all synchronous operations in sequence, the HBM traffic of the step
    including asynchronous copies, and collectives on the links.
    """
    synchronous = sum(op.seconds(chip) for op in operations if not op.asynchronous)
    traffic = sum(op.count * op.bytes for op in operations) / chip.bandwidth
    return max(synchronous, traffic, link_seconds(operations, chip))


def link_seconds(operations: Sequence[Operation], chip: Chip) -> float:
    """Compute the minimum time of all collectives on the links of one chip."""
    return sum(op.count * op.collective.sent for op in operations if op.collective) / chip.link


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the bytes that an instruction reads and writes in one execution."""
    operands = [computation[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode in ('fusion', 'async-start') and instruction.called:
        return _fusion_bytes(module, operands, instruction)
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
    """Return the arrays that an instruction writes.

    The tuple of an asynchronous start also holds its operands and a context. A slice that is read
    asynchronously is an `async-start` that calls it in the schedule, and a `slice-start` after code
    generation: both have the type `((operands), result, context)`. The last result of a call of
    cuBLAS or cuDNN is its workspace.
    """
    arrays, kind = instruction.arrays, instruction.opcode.removesuffix('-start')
    if instruction.target.startswith(LIBRARIES):
        return arrays[:-1]
    if kind == instruction.opcode or kind == 'all-reduce':
        return arrays
    if kind == 'copy':  # result, operand, context
        return arrays[:1]
    read = sum(len(operand.arrays) for operand in operands)
    return arrays[read : read + (read if kind in KINDS else 1)]


def _fusion_bytes(module: Module, operands: list[Instruction], outside: Instruction) -> int:
    computation = module.computations[outside.called[0]]
    written_arrays, read = _continued_arrays(outside)
    reads = sum(
        _hbm(operand) if (part := _part_read(module, computation, parameter)) is None
        else part * (operand.arrays[0].space == 0)
        for i, (parameter, operand) in enumerate(
            zip(computation.parameters, operands, strict=False)
        )
        if operand.arrays and i not in read
    )  # fmt: skip
    return reads + _bytes_written(module, computation, outside, written_arrays)


def _part_read(module: Module, computation: Computation, parameter: Instruction) -> int | None:
    """Count the bytes of a parameter that a (nested) fusion reads; None for all."""
    total = 0
    for user in computation.users[parameter.name]:
        if user.opcode in THROUGH or user.opcode == 'fusion':
            for location, name in _names_of(module, computation, user, parameter):
                if (part := _part_read(module, location, name)) is None:
                    return None
                total += part
        elif user.opcode in SLICES and user.operands[0] == parameter.name:
            total += user.arrays[0].size
        elif user.opcode != UPDATE or user.operands[0] != parameter.name:
            return None
    return total


def _names_of(
    module: Module, computation: Computation, user: Instruction, operand: Instruction
) -> list[tuple[Computation, Instruction]]:
    """Find the instructions for `operand` in its user: parameters of a nested fusion."""
    if user.opcode in THROUGH:
        return [(computation, user)]
    within = module.computations[user.called[0]]
    pairs = zip(within.parameters, user.operands, strict=True)
    return [(within, parameter) for parameter, name in pairs if name == operand.name]


def _continued_arrays(fusion: Instruction) -> tuple[set[int], set[int]]:
    """Return results and operands of a continued collective, counted where it began."""
    match = ALIASING.search(fusion.attributes)
    if match is None or not (begins_collective(fusion) or continues_collective(fusion)):
        return set(), set()
    pairs = re.findall(r'\{(\d*)\}: \((\d+)', match[1])
    results = {int(result or 0) for result, _ in pairs}
    return results, set() if begins_collective(fusion) else {int(operand) for _, operand in pairs}


def _bytes_written(
    module: Module, computation: Computation, outside: Instruction, skipped: set[int]
) -> int:
    """Count the bytes that a fusion writes; of in-place updates, only the update."""
    root = computation.root
    results = [computation[name] for name in root.operands] if root.opcode == 'tuple' else [root]
    arrays = outside.arrays
    if outside.opcode == 'async-start':  # (operands), results, context
        arrays = arrays[len(outside.operands) :][: sum(len(result.arrays) for result in results)]
    if len(results) != len(arrays):
        return sum(a.hbm for i, a in enumerate(arrays) if i not in skipped)
    return sum(
        _size_written(module, computation, result) * (array.space == 0)
        for i, (result, array) in enumerate(zip(results, arrays, strict=True))
        if i not in skipped
    )


def _size_written(module: Module, computation: Computation, result: Instruction) -> int:
    while result.opcode in THROUGH or (result.opcode == 'fusion' and len(result.arrays) == 1):
        if result.opcode == 'fusion':
            computation = module.computations[result.called[0]]
            result = computation.root
        else:
            result = computation[result.operands[0]]
    result_array = computation[result.operands[1]] if result.opcode == UPDATE else result
    return result_array.arrays[0].size


def _part(array: Array, of: Array) -> int:
    """Return the bytes of an array that is part of `of`; 0 if `of` is not in HBM."""
    return array.size if of.space == 0 else 0


def _hbm(instruction: Instruction) -> int:
    return sum(array.hbm for array in instruction.arrays)


def collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """Return the collective that an instruction performs or starts; None if it continues one."""
    kind = instruction.opcode.removesuffix('-start')
    if kind in KINDS:
        groups = groups_of(instruction.attributes)
        size = sum(a.size for name in instruction.operands for a in computation[name].arrays)
        chips = max(map(len, groups), default=1)
        return Collective(kind, size * (chips if kind == 'all-gather' else 1), groups)
    if continues_collective(instruction):
        return None
    for name in instruction.called:
        inside = module.computations[name]
        for inner in inside:
            if inner_collective := collective(module, inside, inner):
                # A chip keeps only its part of the sum.
                scattered = name.startswith('all-reduce-scatter')
                return (
                    dataclasses.replace(inner_collective, kind='reduce-scatter')
                    if scattered
                    else inner_collective
                )
    return None


def begins_collective(instruction: Instruction) -> bool:
    """Return whether a collective starts that continues in other instructions."""
    return instruction.name.startswith('async-collective-start')


def continues_collective(instruction: Instruction) -> bool:
    """Return whether an instruction continues an earlier collective, overlapping other work."""
    return any(name.startswith('async_collective_fusion') for name in instruction.called)


def ends_collective(instruction: Instruction) -> bool:
    """Return whether an instruction waits for an earlier collective."""
    return instruction.name.startswith('async-collective-done')


def groups_of(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups of chips in any of HLO's three notations."""
    if match := MESH.search(attributes):
        return _groups_along(*match.groups())
    if match := COMPACT.search(attributes):
        shape, source, order = (
            [int(n) for n in part.split(',')] if part else [] for part in match.groups()
        )
        ids = np.arange(math.prod(source)).reshape(source)
        return tuple(map(tuple, ids.transpose(order or None).reshape(shape).tolist()))
    if match := LISTED.search(attributes):
        group_texts = re.findall(r'\{([\d,]*)\}', match[1])
        return tuple(tuple(int(n) for n in group.split(',') if n) for group in group_texts)
    return ()


def _groups_along(mesh: str, order: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups along mesh axes: `'a'=4,'b'=2` and `'a','b':(1)2`, a part of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    subaxes = {name: (int(p or 1), int(n or 0)) for name, p, n in SUBAXIS.findall(axes)}
    shape, grouped = [], []
    for name, size in sizes.items():
        before, part = subaxes.get(name, (1, 1))
        part = part or size
        shape += [before, part, size // (before * part)]
        grouped += [False, name in subaxes, False]
    ids = np.arange(math.prod(shape))
    if order and (match := PERMUTED.fullmatch(order)):  # ids as `[2,4]T(1,0)`
        source, axis_order = ([int(n) for n in part.split(',')] for part in match.groups())
        ids = ids.reshape(source).transpose(axis_order).ravel()
    elif order:
        ids = np.array([int(n) for n in order.split(',')])
    fixed_axes = [i for i, is_along in enumerate(grouped) if not is_along]
    last = [i for i, is_along in enumerate(grouped) if is_along]
    count = math.prod(shape[i] for i in last)
    return tuple(
        map(tuple, ids.reshape(shape).transpose(fixed_axes + last).reshape(-1, count).tolist())
    )
