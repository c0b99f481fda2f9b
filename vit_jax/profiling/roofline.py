"""The roofline of a scheduled program: cost and least time of every operation on a chip.

An operation takes at least FLOPs / peak, and at least bytes / bandwidth, where bytes are those that
it moves from and to HBM (Williams et al. 2009, "Roofline"). The bound ignores gaps between
operations, and matrices that do not fill the matrix units.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from vit_jax.profiling import hlo_traffic
from vit_jax.profiling.collectives import Collective, begins, collective, ends
from vit_jax.profiling.hlo_flops import flops
from vit_jax.profiling.hlo_loops import trips
from vit_jax.profiling.hlo_traffic import TRANSFERS
from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module
from vit_jax.profiling.topology import Chip

# These move nothing: they name existing arrays, or are no operations at run time.
FREE = frozenset((
    *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
    *('after-all', 'partition-id', 'replica-id', 'opt-barrier', 'domain'),
))  # fmt: skip
# Nor do these: space that a loop will write into, and a concatenation of adjacent parts.
UNMOVED = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """One instruction of the schedule, all of its repetitions.

    Attributes:
      path: of its Flax module, see `module_path`.
      kind: its opcode.
      flops, bytes: of one repetition, on one chip; bytes are those of HBM.
      count: repetitions in loops.
      asynchronous: whether other operations run at the same time.
      collective: its exchange with other chips, if there is one.
      cycles: the compiler's estimate for one repetition, if there is one.
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
        """Least time of all repetitions."""
        return self.count * max(self.flops / chip.peak, self.bytes / chip.bandwidth)


def operations(module: Module) -> list[Operation]:
    """The operations of the schedule, without those that cost nothing."""
    return list(_walk(module, module.entry, 1))


def bound(found: Sequence[Operation], chip: Chip) -> float:
    """Lower bound on the seconds of a step.

    The maximum of three times: of all synchronous operations one after the other, of the HBM
    traffic of the whole step including asynchronous copies, and of collectives on the links.
    """
    alone = sum(op.seconds(chip) for op in found if not op.asynchronous)
    traffic = sum(op.count * op.bytes for op in found) / chip.bandwidth
    return max(alone, traffic, link_seconds(found, chip))


def link_seconds(found: Sequence[Operation], chip: Chip) -> float:
    """Least time of all collectives on the links of one chip."""
    return sum(op.count * op.collective.sent for op in found if op.collective) / chip.link


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
    """The operations of an instruction, those of a loop `count` times as often as it turns."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(('-done', '-update')) or ends(instruction):
        return
    if any(target in instruction.attributes for target in UNMOVED):
        return
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
        yield operation(module, computation, instruction, count, asynchronous)


def operation(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    count: int = 1,
    asynchronous: bool = False,
) -> Operation:
    """An instruction that runs `count` times, with its FLOPs and bytes."""
    opcode = instruction.opcode
    started = opcode.endswith('-start') or opcode in TRANSFERS or begins(instruction)
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
    """The name of an instruction, or of the last one inside it that has a name."""
    if instruction.op_name or not instruction.called:
        return instruction.op_name
    inside = [i.op_name for name in instruction.called for i in module.computations[name]]
    return next((name for name in reversed(inside) if name), '')


def module_path(op_name: str) -> str:
    """The module and direction of an operation, as `encoder/block_*/mlp, backward`.

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


_WRAPPERS = frozenset((
    *('checkpoint', 'rematted_computation', 'closed_call'),
    *('while', 'body', 'body_pred', 'cond', 'branch', 'shard_map'),
))  # fmt: skip
