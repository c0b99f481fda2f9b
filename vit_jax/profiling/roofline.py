"""What every operation of a scheduled program costs, and the least time that a chip takes for it.

An operation takes at least FLOPs / peak, and at least bytes / bandwidth, where bytes are those that
it moves from and to HBM (Williams et al. 2009, "Roofline"). Neither the gaps between operations nor
matrices that do not fill the matrix units are in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from vit_jax.profiling import hlo_traffic
from vit_jax.profiling.collectives import Collective, begins, collective, ends
from vit_jax.profiling.hlo_flops import flops
from vit_jax.profiling.hlo_loops import trips
from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module
from vit_jax.profiling.topology import Chip

# They move nothing: names of what is there already, or the second half of what was begun.
FREE = frozenset((
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
    *('after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain'),
))  # fmt: skip
# Nor do these: space that a loop will write into, and parts that lie side by side already.
UNMOVED = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the schedule, all of its repetitions.

    Attributes:
      path: of the module that it comes from, see `module_path`.
      kind: its opcode.
      flops, bytes: of one repetition, on one chip; bytes are those of HBM.
      count: repetitions in loops.
      asynchronous: whether others run meanwhile.
      collective: what it exchanges with other chips, if it does.
      cycles: estimate of the compiler for one repetition, where it has made one.
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
        """The least that all repetitions take."""
        return self.count * max(self.flops / chip.peak, self.bytes / chip.bandwidth)


def operations(module: Module) -> list[Operation]:
    """Those of the schedule that cost anything."""
    return list(_walk(module, module.entry, 1))


def bound(found: Sequence[Operation], chip: Chip) -> float:
    """The least seconds that a step takes.

    Those of its operations one after the other, where copies that run meanwhile cost nothing but
    what they add to the bytes of the whole step, and exchanges nothing but what the links carry.
    """
    alone = sum(op.seconds(chip) for op in found if not op.asynchronous)
    traffic = sum(op.count * op.bytes for op in found) / chip.bandwidth
    return max(alone, traffic, link_seconds(found, chip))


def link_seconds(found: Sequence[Operation], chip: Chip) -> float:
    """The least that what chips exchange takes on the links of one."""
    return sum(op.count * op.collective.sent for op in found if op.collective) / chip.link


def _walk(
    module: Module, computation: Computation, count: int, asynchronous: bool = False
) -> Iterator[Operation]:
    for instruction in computation:
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(('-done', '-update')) or ends(instruction):
            continue
        if any(target in instruction.attributes for target in UNMOVED):
            continue
        called = [module.computations[name] for name in instruction.called]
        if opcode == 'while':
            repeated = count * trips(module, computation, instruction)
            yield from _walk(module, called[0], repeated)
        elif opcode == 'conditional':
            branches = [list(_walk(module, branch, count)) for branch in called]
            yield from max(branches, key=lambda ops: sum(op.flops + op.bytes for op in ops))
        elif opcode == 'call':
            yield from _walk(module, called[0], count, asynchronous)
        else:
            yield _operation(module, computation, instruction, count, asynchronous)


def _operation(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    count: int,
    asynchronous: bool,
) -> Operation:
    started = instruction.opcode.endswith('-start') or begins(instruction)
    return Operation(
        path=module_path(_op_name(module, instruction)) or instruction.opcode,
        kind=instruction.opcode,
        flops=flops(module, computation, instruction),
        bytes=hlo_traffic.bytes_moved(module, computation, instruction),
        count=count,
        asynchronous=asynchronous or started,
        collective=collective(module, computation, instruction),
        cycles=instruction.cycles,
    )


def _op_name(module: Module, instruction: Instruction) -> str:
    """Its own, or that of the last instruction inside which has one."""
    if instruction.op_name or not instruction.called:
        return instruction.op_name
    inside = [i.op_name for name in instruction.called for i in module.computations[name]]
    return next((name for name in reversed(inside) if name), '')


def module_path(op_name: str) -> str:
    """Where an operation belongs, as `encoder/block_*/mlp, backward`.

    JAX says `jit(train_step)/transpose(jvp(Model))/encoder/block_6/mlp/dot_general` of it. Blocks
    are not told apart, and what belongs to no module is the `update`.
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


_WRAPPERS = frozenset((
    *('checkpoint', 'rematted_computation', 'closed_call'),
    *('while', 'body', 'body_pred', 'cond', 'branch', 'shard_map'),
))  # fmt: skip
