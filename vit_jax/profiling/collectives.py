"""Collectives between chips, with their sizes and mesh axes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.profiling.scheduled_hlo import Computation, Instruction, Module

MESH = re.compile(r'replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? \{([^}]*)\}')
SUBAXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
LISTED = re.compile(r'(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}')
COMPACT = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      kind: of KINDS.
      size: bytes of the whole array that a chip sends or receives, whichever is larger.
      groups: chips that communicate with one another, by their places in the mesh.
    """

    kind: str
    size: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> float:
        """Least number of bytes that a chip sends, around a ring."""
        chips = max(map(len, self.groups), default=1)
        if self.kind == 'collective-permute':
            return self.size
        return (2 if self.kind == 'all-reduce' else 1) * self.size * (chips - 1) / chips

    def axis(self, mesh: Mapping[str, int]) -> str:
        """The axes of the mesh that it spans, as `data` or `data+fsdp`; empty for none.

        Args:
          mesh: {axis: size}, in the order in which the chips are numbered.
        """
        places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        moved = set()
        for group in self.groups:
            where = np.argwhere(np.isin(places, group))
            moved |= {name for i, name in enumerate(mesh) if len(set(where[:, i])) > 1}
        return '+'.join(name for name in mesh if name in moved)


def collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Collective | None:
    """The collective that an instruction performs or begins; None if it continues one."""
    kind = instruction.opcode.removesuffix('-start')
    if kind in KINDS:
        groups = groups_of(instruction.attributes)
        size = sum(a.size for name in instruction.operands for a in computation[name].arrays)
        chips = max(map(len, groups), default=1)
        return Collective(kind, size * (chips if kind == 'all-gather' else 1), groups)
    if continues(instruction):
        return None
    for name in instruction.called:
        inside = module.computations[name]
        for inner in inside:
            if found := collective(module, inside, inner):
                # A chip keeps only its part of the sum.
                scattered = name.startswith('all-reduce-scatter')
                return dataclasses.replace(found, kind='reduce-scatter') if scattered else found
    return None


def begins(instruction: Instruction) -> bool:
    """Whether a collective begins that continues in other instructions."""
    return instruction.name.startswith('async-collective-start')


def continues(instruction: Instruction) -> bool:
    """Whether a collective that began before continues inside, beside other work."""
    return any(name.startswith('async_collective_fusion') for name in instruction.called)


def ends(instruction: Instruction) -> bool:
    """Whether an instruction waits for a collective that began before."""
    return instruction.name.startswith('async-collective-done')


def groups_of(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Groups of chips in any of HLO's three notations."""
    if match := MESH.search(attributes):
        return _along(*match.groups())
    if match := COMPACT.search(attributes):
        shape, source, order = (
            [int(n) for n in part.split(',')] if part else [] for part in match.groups()
        )
        ids = np.arange(math.prod(source)).reshape(source)
        return tuple(map(tuple, ids.transpose(order or None).reshape(shape).tolist()))
    if match := LISTED.search(attributes):
        listed = re.findall(r'\{([\d,]*)\}', match[1])
        return tuple(tuple(int(n) for n in group.split(',') if n) for group in listed)
    return ()


def _along(mesh: str, order: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh, as `'a'=4,'b'=2` and `'a','b':(1)2`, which is a part of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    chosen = {name: (int(p or 1), int(n or 0)) for name, p, n in SUBAXIS.findall(axes)}
    shape, grouped = [], []
    for name, size in sizes.items():
        before, part = chosen.get(name, (1, 1))
        part = part or size
        shape += [before, part, size // (before * part)]
        grouped += [False, name in chosen, False]
    ids = np.array([int(n) for n in order.split(',')]) if order else np.arange(math.prod(shape))
    kept = [i for i, inside in enumerate(grouped) if not inside]
    last = [i for i, inside in enumerate(grouped) if inside]
    count = math.prod(shape[i] for i in last)
    return tuple(map(tuple, ids.reshape(shape).transpose(kept + last).reshape(-1, count).tolist()))
