"""Exchanges between slices, over the data-center network, in the schedule of a compiled step.

A chip sends its part of the gradients to its host, which exchanges it with the hosts of other
slices; all chips of a host share its network card. The schedule determines when each part is sent
and when its sum is needed, and so how much of the exchange overlaps with computation. At best, each
part is sent as soon as the backward pass has computed it, and only the next step waits for it.

GPUs have hosts in place of slices. Their collectives are counted as rings that pass through each
host once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from vit_jax.profiling import roofline
from vit_jax.profiling.hlo import Computation, Instruction, Module
from vit_jax.profiling.topology import Gpu, Topology

HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
BISECTIONS = 40


@dataclasses.dataclass(frozen=True)
class Moment:
    """A time in a step in seconds: one part grows with the batch, the other is fixed."""

    growing: float = 0
    fixed: float = 0

    def at(self, growth: float) -> float:
        return growth * self.growing + self.fixed


@dataclasses.dataclass(frozen=True)
class Event:
    """Start or end of an exchange in a schedule.

    Attributes:
      key: Key of the exchange.
      when: Time in the schedule for an infinitely fast network.
      ready: Time when the array has been computed.
      bytes: Bytes that a chip sends; 0 for the end.
      count: Number of arrays that it sends.
    """

    key: str
    when: Moment
    ready: Moment
    bytes: float = 0
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Exchanges of a step.

    Attributes:
      events: Events in order.
      end: End of the step without exchanges.
    """

    events: Sequence[Event]
    end: Moment

    def scheduled(self, rate: float, growth: float = 1) -> float:
        """Compute a step's seconds if exchanges use the network one after the other.

        Args:
          rate: Bytes per second that a chip sends.
          growth: Growth factor of the batch.
        """
        waited = free = 0.0
        arrived: dict[str, float] = {}
        for event in self.events:
            clock = event.when.at(growth) + waited
            if event.bytes:
                arrived[event.key] = free = max(free, clock) + event.bytes / rate
            else:
                waited += max(arrived.get(event.key, 0.0) - clock, 0.0)
        return self.end.at(growth) + waited

    def best(self, rate: float, growth: float = 1) -> float:
        """Compute a step's seconds if each array is sent as soon as it is ready."""
        free = 0.0
        for ready, size in sorted((e.ready.at(growth), e.bytes) for e in self.events if e.bytes):
            free = max(free, ready) + size / rate
        return max(free, self.end.at(growth))


@dataclasses.dataclass(frozen=True)
class Overlap:
    """A step whose exchanges overlap with computation.

    Attributes:
      hidden: Seconds of exchanges during which chips compute.
      step: Lower bound on the seconds of the step, including other exchanges.
      speedup: Speedup of the step over one slice with the same global batch.
      pays_from: Smallest global batch with a speedup above 1.
    """

    hidden: float
    step: float
    speedup: float
    pays_from: int


@dataclasses.dataclass(frozen=True)
class Speed:
    """Exchanges over a network of one speed.

    Attributes:
      gbits: Gigabits per second that a host sends, and receives.
      seconds: Seconds of all exchanges.
      scheduled: Overlap in the compiler's schedule.
      best: Overlap if each array were sent as soon as it is ready.
    """

    gbits: int
    seconds: float
    scheduled: Overlap
    best: Overlap


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Exchanges between slices in a step.

    Attributes:
      slices: Number of slices.
      count: Number of arrays that a chip sends.
      host_bytes: Bytes that a host sends, and receives.
      speeds: Results for several network speeds.
    """

    slices: int
    count: int
    host_bytes: float
    speeds: Sequence[Speed]


def measure_crossing(module: Module, topology: Topology, rows: int, unit: int = 1) -> Crossing:
    """Measure a training step's exchanges between slices.

    Time is assumed to be proportional to the batch, except for the update of the parameters and for
    exchanges.

    Args:
      module: Scheduled step.
      topology: Topology of several slices.
      rows: Rows of a global batch.
      unit: Divisor of a global batch.
    """
    exchanges = schedule(module, topology)
    chips = topology.slice_devices // topology.slice_hosts
    sent = sum(e.bytes for e in exchanges.events)

    def overlap(seconds: Callable[[float, float], float], rate: float) -> Overlap:
        step, without_exchanges = seconds(rate, 1), exchanges.end.at(1)
        return Overlap(
            hidden=max(sent / rate - (step - without_exchanges), 0.0),
            step=step,
            speedup=exchanges.end.at(topology.slices) / step if step else 0,
            pays_from=pays_from(
                lambda growth: seconds(rate, growth) < exchanges.end.at(topology.slices * growth),
                rows,
                unit,
            ),
        )

    rates = {gbits: gbits * 1e9 / 8 / chips for gbits in topology.chip.networks}
    return Crossing(
        slices=topology.slices,
        count=sum(e.count for e in exchanges.events if e.bytes),
        host_bytes=chips * sent,
        speeds=[
            Speed(
                gbits,
                sent / rate,
                overlap(exchanges.scheduled, rate),
                overlap(exchanges.best, rate),
            )
            for gbits, rate in rates.items()
        ],
    )


def pays_from(pays: Callable[[float], bool], rows: int, unit: int) -> int:
    """Find the smallest global batch that pays off, a multiple of `unit`.

    Args:
      pays: Function that returns whether a batch of `rows` times a factor pays off.
      rows: Rows of the compiled batch.
      unit: See `measure_crossing`.
    """
    low, high = 0.0, 1.0
    while not pays(high) and high < 2**BISECTIONS:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return max(-int(-high * rows // unit), 1) * unit


def schedule(module: Module, topology: Topology) -> Schedule:
    """Find the exchanges between slices in a schedule, stretched to the step's bound."""
    chip, entry = topology.chip, module.entry
    operations = roofline.operations(module)
    synchronous = sum(op.seconds(chip) for op in operations if not op.asynchronous)
    stretch = roofline.bound(operations, chip) / synchronous if synchronous else 1
    clock, events = Moment(), []
    ready: dict[str, Moment] = {}
    started = set[str]()
    for instruction in entry:
        needed = (ready[name] for name in instruction.operands)
        ready[instruction.name] = max(needed, key=lambda m: m.at(1), default=Moment())
        if exchange := _exchange(entry, instruction, topology.slices):
            events.append(Event(exchange[0], clock, ready[instruction.name], exchange[1]))
            continue
        inside = list(roofline.expand(module, entry, instruction))
        if sent := _between_hosts(inside, topology):
            started.add(instruction.name)
            events.append(Event(instruction.name, clock, ready[instruction.name], *sent))
        growing, fixed = _seconds(inside, topology)
        clock = Moment(clock.growing + stretch * growing, clock.fixed + stretch * fixed)
        key = instruction.operands[0] if instruction.opcode.endswith('-done') else instruction.name
        if key in started and not instruction.opcode.endswith('-start'):
            events.append(Event(key, clock, Moment()))
        # Sums within a slice may stand anywhere in the schedule; they have no matmuls.
        if growing and any(op.flops for op in inside):
            ready[instruction.name] = clock
    return Schedule(events, clock)


def _seconds(operations: Sequence[roofline.Operation], topology: Topology) -> tuple[float, float]:
    """Sum synchronous seconds that grow with the batch, and fixed ones.

    Exchanges within a slice are fixed.
    """
    growing = fixed = 0.0
    for op in operations:
        if op.asynchronous:
            continue
        if op.path.endswith(('forward', 'backward')) and not op.collective:
            growing += op.seconds(topology.chip)
        else:
            fixed += op.seconds(topology.chip)
    return growing, fixed


def _between_hosts(
    operations: Sequence[roofline.Operation], topology: Topology
) -> tuple[float, int] | None:
    """Return the bytes that a GPU sends in collectives, and their number; None without any.

    A host sends what a ring of the hosts needs, and the GPUs of a group share this.
    """
    if not isinstance(topology.chip, Gpu):
        return None
    total, count = 0.0, 0
    for op in operations:
        if op.collective is None or not op.collective.groups:
            continue
        group = op.collective.groups[0]
        hosts = len({index // topology.slice_chips for index in group})
        if hosts > 1:
            ring = dataclasses.replace(op.collective, groups=(tuple(range(hosts)),))
            total += op.count * ring.sent * hosts / len(group)
            count += op.count
    return (total, count) if count else None


def _exchange(
    entry: Computation, instruction: Instruction, slices: int
) -> tuple[str, float] | None:
    """Return the key of the exchange that an instruction starts or ends, and the bytes it sends."""
    if HANDLER not in instruction.attributes:
        return None
    if instruction.opcode == 'send':
        size = entry[instruction.operands[0]].arrays[0].size
        kind = TRANSFER.search(instruction.attributes)
        around_a_ring = kind is not None and kind[1] == 'ALL_REDUCE'
        share = 2 * (slices - 1) / slices if around_a_ring else slices - 1
        return _key(instruction), share * size
    if instruction.opcode == 'recv-done':
        return _key(entry[instruction.operands[0]]), 0
    return None


def _key(instruction: Instruction) -> str:
    match = RENDEZVOUS.search(instruction.attributes)
    return match[1] if match else ''
