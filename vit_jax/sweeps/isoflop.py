"""IsoFLOP studies: a family of shapes, each trained with several budgets of FLOPs.

Hoffmann et al. 2022, section 3, approach 2. With a cooldown, one run at a constant rate for each
shape and seed is branched at the length of every budget: Hägele et al. 2024 (arXiv:2405.18392),
section 3, find the same losses as with a cosine of each length.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ml_collections import ConfigDict

from vit_jax.config.load import load as load_config
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.profiling import benchmark, cost
from vit_jax.profiling.batch_spec import batch_rows
from vit_jax.profiling.cost import PlannedRun
from vit_jax.sweeps import asha, space

MIN_RATIO = 1.3  # of neighboring budgets, so that an analysis distinguishes them
TOLERANCE = 0.02  # share by which a run of whole steps may miss its budget
_WARMUP, _COOLDOWN = 'optim.schedule.warmup', 'optim.schedule.cooldown'


@dataclasses.dataclass(frozen=True)
class Isoflop:
    """A study at equal compute; `get_sweep` of a file may return one instead of a `Sweep`.

    FLOPs are the training FLOPs of `scaling plan` and `scaling collect`, exactly.

    Attributes:
      config: Base config, in the form of `--config`: FILE[:ARG].
      metric: Metric of the final evaluation, such as `test/loss`.
      shapes: Values of each size of the family: `{'model.width': 64, ...}`, and what is tuned for
        it, such as `'optim.lr'`.
      budgets: FLOPs of training of a run.
      seeds: Seeds at each budget, smallest first; the last number applies to all larger budgets.
      warmup: Warm-up as a share of a run's steps; with a cooldown, of its shortest branch's steps.
      cooldown: Share of a run's steps in which the learning rate falls, after a constant one that
        the runs of one shape and seed share; 0 for separate runs with the config's schedule.
      batch_exponent: Growth of the batch, by powers of two, about budget^batch_exponent, from
        `config.batch_size` at the smallest budget.
      overrides: Changes to the base config for every run, by dimension.
      direction: `maximize` or `minimize` the metric.
      optimum: (parameters, budget), an estimate from a first round, for example; each budget then
        trains the `per_budget` shapes nearest to its optimum (Hoffmann et al. 2022).
      exponent: Growth of the optimum, parameters ~ budget^exponent.
      per_budget: Number of shapes at each budget; used with `optimum`.

    Raises:
      UserError: for invalid values.
    """

    config: str
    metric: str
    shapes: Sequence[space.Point]
    budgets: Sequence[float]
    seeds: Sequence[int] = (1,)
    warmup: float = 0.05
    cooldown: float = 0.0
    batch_exponent: float = 0.0
    overrides: Mapping[str, object] = dataclasses.field(default_factory=dict)
    direction: str = 'minimize'
    optimum: tuple[float, float] | None = None
    exponent: float = 0.5
    per_budget: int = 6

    def __post_init__(self) -> None:
        _check_budgets(self.budgets)
        if len(self.shapes) < 3 or any(set(s) != set(self.shapes[0]) for s in self.shapes):
            raise UserError('isoflop: give three shapes or more, all with the same dimensions')
        if not self.seeds or any(n < 1 for n in self.seeds):
            raise UserError(f'isoflop: seeds={tuple(self.seeds)}: every budget needs at least one')
        if min(self.warmup, self.cooldown) < 0 or self.warmup + self.cooldown >= 1:
            raise UserError(
                f'isoflop: warmup={self.warmup:g} and cooldown={self.cooldown:g} are shares of a '
                'run: at least 0, and together less than 1'
            )
        if self.optimum is not None:
            _check_optimum(self.optimum, self.exponent, self.per_budget)
        if self.cooldown and self.batch_exponent:
            raise UserError(
                'isoflop: batch_exponent needs separate runs, since branches share the batch of '
                'their trunk: give cooldown=0'
            )

    def sweep(self) -> space.Sweep:
        """Return the trials: trunks first, which run longest, then from small to large budgets.

        Raises:
          UserError: as `runs`.
        """
        overrides_by_trial = runs(self)
        constant = {'optim.schedule.name': 'constant'} if self.cooldown else {}
        return space.Sweep(
            config=self.config,
            metric=self.metric,
            direction=self.direction,
            points=_add_branches(self, overrides_by_trial)
            if self.cooldown
            else [_point(self, r) for r in overrides_by_trial],
            overrides={**self.overrides, **constant},
        )


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """A run of the study.

    Attributes:
      budget: FLOPs that it was given.
      shape: Shape of its model.
      seed: Seed, from 0.
      plan: Cost of the run; a branch counts from its trunk's first step on.
      warmup, cooldown: Numbers of steps.
    """

    budget: float
    shape: space.Point
    seed: int
    plan: PlannedRun
    warmup: int
    cooldown: int

    @property
    def branch_step(self) -> int:
        """Last step at the constant rate."""
        return self.plan.steps - self.cooldown


def runs(study: Isoflop) -> list[StudyRun]:
    """Plan the runs of all budgets, shapes and seeds, with their steps and batches.

    Raises:
      UserError: for a budget below one step of a shape, or missed by whole steps by more than 2 %;
        or a config that refuses a shape.
    """
    priced = [(shape, _price(study, shape)) for shape in study.shapes]
    budgets = sorted(study.budgets)
    shortest: dict[int, float] = {}  # the smallest budget of each shape
    planned_runs = []
    for plans_by_budget, budget in enumerate(budgets):
        growth = round(math.log2((budget / budgets[0]) ** study.batch_exponent))
        for shape, plan in _nearest(study, priced, budget):
            plan_with_batch = dataclasses.replace(plan, batch_size=plan.batch_size * 2**growth)
            longest = _with_steps(plan_with_batch, budget, shape)
            branch_step = shortest.setdefault(id(shape), budget)
            trunk = longest if not study.cooldown else _with_steps(plan, branch_step, shape)
            warmup = max(1, round(study.warmup * trunk.steps)) if study.warmup else 0
            cooldown = max(1, round(study.cooldown * longest.steps)) if study.cooldown else 0
            number = study.seeds[min(plans_by_budget, len(study.seeds) - 1)]
            planned_runs += [
                StudyRun(budget, shape, s, longest, warmup, cooldown) for s in range(number)
            ]
    return planned_runs


def _nearest(
    study: Isoflop, priced: list[tuple[space.Point, PlannedRun]], budget: float
) -> list[tuple[space.Point, PlannedRun]]:
    """Choose the shapes of a budget, in order: all, or the nearest to its optimum."""
    if study.optimum is None:
        return priced
    parameters, log_size = study.optimum
    optimal_size = math.log(parameters) + study.exponent * math.log(budget / log_size)
    ends = min(plan.parameters for _, plan in priced), max(plan.parameters for _, plan in priced)
    if not math.log(ends[0]) <= optimal_size <= math.log(ends[1]):
        raise UserError(
            f'isoflop: the optimum at the budget {budget:g} is {math.exp(optimal_size):,.0f} '
            f'parameters; shapes have {ends[0]:,} to {ends[1]:,}: add shapes on both sides of it'
        )
    distance = [abs(math.log(plan.parameters) - optimal_size) for _, plan in priced]
    nearest = sorted(range(len(priced)), key=distance.__getitem__)[: study.per_budget]
    return [priced[i] for i in sorted(nearest)]


def _check_optimum(optimum: tuple[float, float], exponent: float, per_budget: int) -> None:
    if len(optimum) != 2 or not all(0 < value < math.inf for value in optimum):
        raise UserError(f'isoflop: optimum={optimum}: give positive parameters and their budget')
    if not 0 < exponent < 1:
        raise UserError(f'isoflop: exponent={exponent:g}: must be more than 0 and less than 1')
    if per_budget < 3:
        raise UserError(f'isoflop: per_budget={per_budget}: a parabola needs three shapes')


def _check_budgets(budgets: Sequence[float]) -> None:
    ordered = sorted(budgets)
    if not ordered or not all(0 < b < math.inf for b in ordered):
        raise UserError(
            f'isoflop: budgets {_format_budgets(budgets)}: give positive numbers of FLOPs'
        )
    for below, above in itertools.pairwise(ordered):
        if above < MIN_RATIO * below:
            raise UserError(
                f'isoflop: budgets {below:g} and {above:g} differ by less than a factor of '
                f'{MIN_RATIO}, which an analysis cannot distinguish'
            )


def _format_budgets(budgets: Sequence[float]) -> str:
    return ', '.join(f'{b:g}' for b in budgets) or '(none)'


def _price(study: Isoflop, shape: space.Point) -> PlannedRun:
    """Compute the cost of a step of one shape."""
    return cost.price(_config(study, shape), point=shape)


def _config(study: Isoflop, shape: space.Point) -> ConfigDict:
    """Make the config of one shape, for a single step."""
    changes = [*space.overrides(dict(study.overrides)), *space.overrides(shape)]
    config = load_config(study.config, [*changes, 'total=1 step'])
    return fine_tune.complete_config(config).config


def _with_steps(plan: PlannedRun, budget: float, shape: space.Point) -> PlannedRun:
    """Plan as many steps as the budget pays for.

    Raises:
      UserError: if whole steps miss the budget by too much.
    """
    step_flops = plan.train * plan.batch_size
    steps = round(budget / step_flops)
    shape_text = ', '.join(space.overrides(shape))
    if budget < step_flops:
        raise UserError(
            f'isoflop: the budget {budget:g} is less than one step of {shape_text}, which takes '
            f'{step_flops:.3g} FLOPs'
        )
    if abs(steps * step_flops / budget - 1) > TOLERANCE:
        raise UserError(
            f'isoflop: the budget {budget:g} is {budget / step_flops:.3g} steps of {shape_text}; '
            f'in whole steps budgets would differ by more than {TOLERANCE:.0%}: give '
            f'{step_flops / (2 * TOLERANCE):.2g} or more, or a smaller config.batch_size'
        )
    return dataclasses.replace(plan, steps=steps)


def _point(study: Isoflop, run: StudyRun) -> space.Point:
    batch = {'batch_size': round(run.plan.batch_size)} if study.batch_exponent else {}
    seed = {'seed': run.seed} if max(study.seeds) > 1 else {}
    length = {'total': f'{run.plan.steps} steps', _WARMUP: f'{run.warmup} steps'}
    return {**run.shape, **seed, **batch, **length}


def _add_branches(study: Isoflop, runs: Sequence[StudyRun]) -> list[space.Point]:
    """Make a trunk for each shape and seed, the most expensive first, then their branches."""
    groups = sorted(_groups(runs), key=lambda group: -_trunk_flops(group))
    trunks: list[space.Point] = []
    number: dict[tuple[int, int], int] = {}
    for index, group in enumerate(groups):
        branch_runs = tuple(run.branch_step for run in group)
        shared = _point(study, group[-1]) | {
            'total': f'{branch_runs[-1]} steps',
            _COOLDOWN: '0 steps',
        }
        trunk_steps = {'checkpoint.keep_steps': str(branch_runs), asha.FROM: '', asha.STEP: 0}
        trunks.append(shared | trunk_steps)
        number |= {(id(run.shape), run.seed): index for run in group}
    return trunks + [
        _point(study, run)
        | {
            _COOLDOWN: f'{run.cooldown} steps',
            'checkpoint.keep_steps': '()',
            asha.FROM: asha.trunk(number[id(run.shape), run.seed]),
            asha.STEP: run.branch_step,
        }
        for run in runs
    ]


def _groups(runs: Sequence[StudyRun]) -> Iterator[list[StudyRun]]:
    """Group the runs of each shape and seed, ascending in length."""
    keys = dict.fromkeys((id(run.shape), run.seed) for run in runs)
    for key in keys:
        yield [run for run in runs if (id(run.shape), run.seed) == key]


def _trunk_flops(group: Sequence[StudyRun]) -> float:
    plan = group[-1].plan
    return dataclasses.replace(plan, steps=group[-1].branch_step).flops


@dataclasses.dataclass(frozen=True)
class StudyCost:
    """Cost of a study in FLOPs.

    Attributes:
      separate: Cost of all runs, each trained from its first step.
      trained: Cost of all steps; less than `separate` with branches.
      seeds: Part of `trained` for seeds after the first.
      examples: Training examples of each shape, in order.
      trunks: Number of runs at a constant rate.
    """

    separate: float
    trained: float
    seeds: float
    examples: tuple[float, ...]
    trunks: int


def study_cost(study: Isoflop) -> StudyCost:
    """Compute the cost of a study; raise UserError like `runs`."""
    all_runs = runs(study)
    trained_flops = [(run, run.plan.steps) for run in all_runs]
    trunks = list(_groups(all_runs)) if study.cooldown else []
    if study.cooldown:
        trained_flops = [(run, run.cooldown) for run in all_runs]
        trained_flops += [(group[-1], group[-1].branch_step) for group in trunks]

    def flops(steps: int, run: StudyRun) -> float:
        return dataclasses.replace(run.plan, steps=steps).flops

    return StudyCost(
        separate=sum(run.plan.flops for run in all_runs),
        trained=sum(flops(steps, run) for run, steps in trained_flops),
        seeds=sum(flops(steps, run) for run, steps in trained_flops if run.seed),
        examples=tuple(
            sum(n * run.plan.batch_size for run, n in trained_flops if run.shape is shape)
            for shape in study.shapes
        ),
        trunks=len(trunks),
    )


def measure_speed(study: Isoflop, steps: int = 10) -> list[float]:
    """Examples per second of training each shape on the devices of this process."""
    rates = []
    for shape in study.shapes:
        facts = cost.data_facts(_config(study, shape))
        rows = batch_rows(facts.run)
        per_row, spec = facts.examples_per_step / rows, facts.kinds[-1].spec
        timing = benchmark.prepare(facts.run, rows).train(spec, per_row, steps)
        rates.append(timing.images_per_sec)
    return rates
