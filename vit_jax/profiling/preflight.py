"""Memory and time of a run on a TPU slice or on GPUs, estimated from its compiled step."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.config.load import from_dict, override, section, to_run
from vit_jax.config.run import Model
from vit_jax.errors import UserError
from vit_jax.nn.attention import POLICIES
from vit_jax.profiling import hlo, network, roofline
from vit_jax.profiling.compile_for import Compiled, compile_step
from vit_jax.profiling.hlo import Module
from vit_jax.profiling.topology import Topology

ASYNC_COPIES = 'parallel copies'
OTHER, TEMPORARIES = 'other', 'activations and temporaries'
ALLOCATION = re.compile(r'^allocation \d+: size (\d+)(?:, color (\d+))?(.*):$', re.M)
PARAMETER = re.compile(r'parameter (\d+)')
# JAX's names of the arguments of a step: state.opt_state[1][0].mu['head']['kernel'].
PARTS = {
    'parameters': re.compile(r"(state\.params|variables\['params'\])"),
    'optimizer': re.compile(r'state\.opt_state'),
    'average of parameters': re.compile(r'state\.(other_)?ema'),
    'batch': re.compile(r'batch'),
}
MIN_MICROBATCH = 8  # examples of a microbatch on a chip
STILL_LESS = 0.99  # of the previous bound: less, and more microbatches are tried
# Of the bound without accumulation. Below 1, since bounds ignore the gaps between operations that
# each microbatch adds.
WORTH = 0.9


class NothingFits(UserError):
    """Not even the smallest batch fits."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind along one mesh axis in a step."""

    kind: str
    axis: str
    asynchronous: bool
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations of one part of the model in a step, or all asynchronous copies."""

    path: str
    flops: int
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on a step on one chip of a slice; only memory and sizes if the step does not fit.

    Attributes:
      topology: Slice topology, such as `v5e:4x4`.
      chips: Number of chips of the slice.
      step: `train`, `eval` or `predict`.
      rows: Rows of a global batch.
      shapes: Shapes of one example, {name: shape}.
      parameters: Parameter count of the model.
      memory: Bytes by contents.
      needed, usable: Bytes of memory; usable is the compiler's limit if the step does not fit, and
        JAX's share of a GPU.
      model_flops: FLOPs of the whole batch, counted as in publications.
      flops, bytes: FLOPs and HBM traffic of the program on a chip.
      bound: Lower bound on the seconds of a step, see `roofline.bound`.
      link: Lower bound on the seconds of collectives.
      peak: Peak FLOP/s of a chip.
      estimate: The compiler's estimate in seconds, if requested by `cycles`.
      exchanges: Exchanges by kind and axis.
      costs: Costs by part of the model, the most expensive first, asynchronous copies last.
      compile_seconds: Time until the schedule, or with `cycles` until the machine code.
      unit: JAX device: `chip`, or `core` of TPU7x; memory, program and bounds are a device's.
      fits: Whether the step fits into the memory of a device.
      crossing: Exchanges between slices, or hosts of GPUs, which are not in `bound`; None on one.
      rematerialized: Operations that the compiler repeats on GPUs to save memory, without
        the names of model.remat.
    """

    topology: str
    chips: int
    step: str
    rows: int
    shapes: Mapping[str, Sequence[int]]
    parameters: int
    memory: Mapping[str, int]
    needed: float
    usable: float
    model_flops: int
    peak: float
    compile_seconds: float
    unit: str = 'chip'
    fits: bool = True
    flops: int = 0
    bytes: int = 0
    bound: float = 0
    link: float = 0
    estimate: float | None = None
    exchanges: Sequence[Exchange] = ()
    costs: Sequence[Cost] = ()
    crossing: network.Crossing | None = None
    rematerialized: int = 0

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilization of a step that takes `seconds`."""
        return self.model_flops / (self.chips * self.peak * seconds)


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """Estimated time of a run.

    Attributes:
      steps: Number of steps.
      seconds: Lower bound for a step, an average if batches have several shapes.
      chips: Number of chips of the slice.
      refusal: Why `train` would refuse the schedules of a run with this length; '' if it would not.
      rows: Mean number of examples per step.
      mfu: MFU at the bound.
    """

    steps: int
    seconds: float
    chips: int
    refusal: str = ''
    rows: float = 0
    mfu: float = 0

    @property
    def hours(self) -> float:
        return self.steps * self.seconds / 3600

    @property
    def chip_hours(self) -> float:
        return self.chips * self.hours


Trials = Mapping[int, tuple[list[Report], RunEstimate]]


def preflight(
    config: ConfigDict,
    topology: Topology,
    program: Sequence[str],
    *,
    step: str = 'train',
    examples: float | None = None,
    image_size: int | None = None,
    cycles: bool = False,
) -> tuple[list[Report], RunEstimate]:
    """Compile every kind of batch of a run, the largest first, and estimate the run.

    Args:
      config: Not changed.
      topology: Topology of the slices to run on.
      program: Program that compiles one step, such as `trainer.ahead_of_time.PROGRAM`; see
        `compile_for`.
      step: `train`, `eval` or `predict`.
      examples, image_size: See `cost.price`.
      cycles: Whether to wait for the compiler's estimates, which take minutes.

    Returns:
      Reports of all kinds of batches, up to the first that does not fit; and the time of the run.

    Raises:
      UserError: see `compile_for.compile_step`.
    """
    request = {
        'config': config.to_dict(),
        'topology': topology.name,
        'step': step,
        'examples': examples,
        'image_size': image_size,
    }
    reports: list[Report] = []
    shares: list[float] = []
    count = 1
    while len(reports) < count and all(r.fits for r in reports):
        kind = -1 - len(reports)
        compiled = compile_step(request | {'kind': kind}, program, cycles=cycles)
        kinds = compiled.facts['kinds']
        count = len(kinds)
        shares.append(kinds[kind]['share'])
        reports.append(make_report(compiled, topology, step, kind))
    seconds, rows, flops = (
        sum(share * number for share, number in zip(shares, numbers, strict=True))
        for numbers in zip(*((r.bound, r.rows, r.model_flops) for r in reports), strict=True)
    )
    mfu = flops / (topology.devices * topology.chip.peak * seconds) if seconds else 0
    facts = compiled.facts
    return reports, RunEstimate(
        facts['steps'], seconds, topology.chips, facts['refusal'], rows, mfu
    )


def make_report(compiled: Compiled, topology: Topology, step: str, kind: int = -1) -> Report:
    """Make the report of a compiled step."""
    facts, chip = compiled.facts, topology.chip
    batch = facts['kinds'][kind]
    common: dict[str, Any] = {
        'topology': topology.name,
        'chips': topology.chips,
        'step': step,
        'rows': batch['rows'],
        'shapes': batch['shapes'],
        'parameters': facts['parameters'],
        'model_flops': batch['flops'][step],
        'peak': chip.peak * chip.devices,
        'unit': topology.unit,
        'compile_seconds': compiled.seconds,
    }
    if compiled.overflow:
        needed, usable = compiled.overflow
        memory = estimated_memory(facts['state'], needed)
        return Report(memory=memory, needed=needed, usable=usable, fits=False, **common)
    module = hlo.parse_module(compiled.module)
    memory = memory_parts(compiled.buffers, module)
    common |= {
        'memory': memory,
        'needed': sum(memory.values()),
        'usable': chip.usable,
        'rematerialized': hlo.count_rematerialized(module),
    }
    if common['needed'] > chip.usable:  # XLA compiles for GPUs anyway
        return Report(fits=False, **common)
    operations = roofline.operations(module)
    cycles = [op.cycles * op.count for op in operations if op.cycles is not None]
    return Report(
        flops=sum(op.count * op.flops for op in operations),
        bytes=sum(op.count * op.bytes for op in operations),
        bound=roofline.bound(operations, chip),
        link=roofline.link_seconds(operations, chip),
        estimate=sum(cycles) / chip.clock if cycles else None,
        exchanges=_exchanges(operations, facts['mesh']),
        costs=costs_of(operations, topology),
        crossing=_measure_crossing(module, topology, batch['rows'], facts)
        if step == 'train'
        else None,
        **common,
    )


def _measure_crossing(
    module: hlo.Module, topology: Topology, rows: int, facts: Mapping[str, Any]
) -> network.Crossing | None:
    if topology.slices == 1:
        return None
    return network.measure_crossing(module, topology, rows, facts['unit'])


def _exchanges(operations: Sequence[roofline.Operation], mesh: Mapping[str, int]) -> list[Exchange]:
    counts: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for op in operations:
        if op.collective and op.collective.sent:
            key = (op.collective.kind, op.collective.axis(mesh), op.asynchronous)
            counts[key][0] += op.count
            counts[key][1] += op.count * op.collective.size
    rows = [Exchange(*key, *values) for key, values in counts.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def costs_of(operations: Sequence[roofline.Operation], topology: Topology) -> list[Cost]:
    """List the cost of each part of the model on a chip, slowest first, copies last."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
    for op in operations:
        path = ASYNC_COPIES if op.asynchronous and not op.collective else op.path
        seconds = op.seconds(topology.chip)
        sums[path] = [a + b for a, b in zip(
            sums[path], (op.count * op.flops, op.count * op.bytes, seconds), strict=True
        )]  # fmt: skip
    rows = [Cost(path, int(flops), int(size), time) for path, (flops, size, time) in sums.items()]
    return sorted(rows, key=lambda row: (row.path == ASYNC_COPIES, -row.seconds))


def remedies(config: ConfigDict, topology: Topology) -> list[str]:
    """List overrides that each reduce a step's memory, such as `model.remat=dots`.

    Args:
      config: Config of the step that does not fit.
      topology: Topology that it was compiled for.
    """
    devices = topology.slice_devices
    overrides = remat_overrides(config)
    if keeps_all_activations(config):
        overrides.append('model.scan=False')
    run = to_run(config)
    if run.parallel.fsdp * run.parallel.tensor == 1 < devices:
        overrides.append(f'parallel.fsdp={devices}')
    accum, shards = run.step.accum_steps, topology.devices // run.parallel.tensor
    if not run.data.buckets and run.batch_size % (2 * accum * shards) == 0:
        overrides += [f'step.accum_steps={2 * accum}', f'batch_size={run.batch_size // 2}']
    return overrides


def remat_overrides(config: ConfigDict) -> list[str]:
    """List overrides that keep fewer activations, in decreasing order."""
    remat = schema.parameters(config, 'model').get('remat')
    if remat is None:
        return []
    current = section(config, Model).options.get('remat', remat.default)
    if str not in schema.accepted_types(remat):
        return [] if current else ['model.remat=True']
    policies = list(POLICIES)
    if current is False:
        return [f'model.remat={name}' for name in policies]
    index = policies.index(current) + 1 if current in policies else len(policies)
    return [f'model.remat={name}' for name in policies[index:]]


def keeps_all_activations(config: ConfigDict) -> bool:
    """Return whether scanned blocks keep all stacked activations for the backward pass."""
    fields = schema.parameters(config, 'model')
    if not {'scan', 'remat'} <= fields.keys():
        return False
    options = section(config, Model).options
    scan, remat = (options.get(key, fields[key].default) for key in ('scan', 'remat'))
    return bool(scan) and not remat


def with_override(config: ConfigDict, change: str) -> ConfigDict:
    """Copy a config with one override."""
    return override(from_dict(config.to_dict()), [change])


def largest_batch(
    config: ConfigDict, topology: Topology, **options: Any
) -> tuple[ConfigDict, tuple[list[Report], RunEstimate]]:
    """Find the config with the largest batch that fits, within an eighth, and its `preflight`.

    Arguments are the same as for `preflight`.

    Raises:
      NothingFits: if not even one example a chip and microbatch fits.
    """
    run = to_run(config)
    if run.data.buckets:
        raise UserError('--batch-size fit counts examples, but this config counts tokens')
    unit = topology.devices // run.parallel.tensor * run.step.accum_steps

    results = {}

    def fits(units: int) -> bool:
        changed = with_override(config, f'batch_size={units * unit}')
        results[units] = changed, preflight(changed, topology, **options)
        return results[units][1][0][0].fits

    if not (units := largest_that_fits(fits, max(run.batch_size // unit, 1))):
        raise NothingFits(f'--batch-size fit: not even {unit} examples fit')
    return results[units]


def memory_parts(buffers: str, module: Module) -> dict[str, int]:
    """Sum bytes of HBM by contents; donated arguments count once, tiles with padding.

    Args:
      buffers: Text dumped by XLA.
      module: Module of these buffers, for the names of its arguments.
    """
    names = {int(p.text): p.op_name for p in module.entry.parameters}
    sizes = dict.fromkeys((*PARTS, TEMPORARIES, OTHER), 0)
    for size, color, label in ALLOCATION.findall(buffers):
        if (color or '0') == '0' and 'thread-local' not in label:
            sizes[_part(label, names)] += int(size)
    return {part: size for part, size in sizes.items() if size}


def _part(label: str, names: Mapping[int, str]) -> str:
    if 'preallocated-temp' in label:
        return TEMPORARIES
    match = PARAMETER.search(label)
    name = names.get(int(match[1]), '') if match else ''
    return next((part for part, pattern in PARTS.items() if pattern.match(name)), OTHER)


def estimated_memory(state: Mapping[str, int], needed: float) -> dict[str, int]:
    """Estimate HBM bytes by contents for a step that does not fit; XLA reports the sum.

    Args:
      state: Bytes by field of the state, without padding.
      needed: Sum in bytes.
    """
    fields = {'params': 'parameters', 'opt_state': 'optimizer', 'ema': 'average of parameters'}
    sizes = {part: state[field] for field, part in fields.items() if state.get(field)}
    return sizes | {f'batch, {TEMPORARIES}': round(needed) - sum(sizes.values())}


def microbatch_counts(config: ConfigDict, topology: Topology) -> list[int]:
    """List powers of two that divide a chip's examples into large enough microbatches.

    Raises:
      UserError: if the batch is counted in tokens, or the chips do not share it equally.
    """
    run = to_run(config)
    if run.data.buckets:
        raise UserError('--accum fit counts examples, but this config counts tokens')
    shards = topology.devices // run.parallel.tensor
    if run.batch_size % shards:
        raise UserError(f'config.batch_size={run.batch_size}: must be a multiple of {shards} chips')
    per_chip = run.batch_size // shards
    powers = (2**i for i in range(per_chip.bit_length()))
    return [n for n in powers if per_chip % n == 0 and (n == 1 or per_chip // n >= MIN_MICROBATCH)]


def with_microbatches(config: ConfigDict, number: int) -> ConfigDict:
    """Copy a config with `number` microbatches."""
    return with_override(config, f'step.accum_steps={number}')


def try_microbatches(
    config: ConfigDict, topology: Topology, **options: Any
) -> Iterator[tuple[int, tuple[list[Report], RunEstimate]]]:
    """Yield numbers of microbatches with their `preflight`, until the bound stops falling.

    Arguments are the same as for `preflight.preflight`.
    """
    previous_seconds = None
    for number in microbatch_counts(config, topology):
        reports, run = preflight(with_microbatches(config, number), topology, **options)
        yield number, (reports, run)
        if all(report.fits for report in reports):
            if previous_seconds is not None and run.seconds > STILL_LESS * previous_seconds:
                return
            previous_seconds = run.seconds


def choose_microbatches(results: Trials) -> tuple[int, str]:
    """Choose the best number of microbatches, and give the reason.

    Raises:
      UserError: if the step fits with none of them.
    """
    fitting = {n: run.seconds for n, (reports, run) in results.items() if reports[-1].fits}
    if not fitting:
        raise UserError('--accum fit: the step does not fit with any number of microbatches')
    fewest, best = min(fitting), min(fitting, key=lambda n: fitting[n])
    saving = 1 - fitting[best] / fitting[fewest]
    if best > fewest and 1 - saving <= WORTH:
        return best, f'step.accum_steps={best} pays: the bound falls by {saving:.0%}'
    if fewest > 1:
        return fewest, f'step.accum_steps={fewest} is the first that fits, and more hardly pays'
    if best == 1:
        return 1, 'accumulation does not pay: it lowers no bound'
    gain = f'by {saving:.0%} with {best} microbatches'
    return 1, f'accumulation does not pay: it lowers the bound {gain}'


def largest_that_fits(fits: Callable[[int], bool], start: int, most: int | None = None) -> int:
    """Find the largest number that fits, within an eighth; 0 if 1 does not.

    Args:
      fits: Function that returns whether a number fits, called once for each.
      start: First number to try, at least 1.
      most: Largest number that may be returned, at least `start`.
    """
    low, high, size = 0, None, start
    while size and (high is None or high - low > max(low // 8, 1)):
        if fits(size):
            low = size
        else:
            high = size
        if high is not None:
            size = (low + high) // 2
        elif low == most:
            break
        else:
            size = 2 * low if most is None else min(2 * low, most)
    return low
