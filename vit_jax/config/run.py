"""Every key of a config, with its type, default, range and meaning.

`load.to_run` makes a `Run` of a config. A comment at a field, or above it, is the key's meaning in
docs/config/, in `list keys` and in `train --help-config`. Keys that a class or an optimizer named
by a section declares itself are in `options`.

A message about a value begins with its key; `load` puts the section in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from vit_jax.errors import UserError, nearest

# A length of a run: '300 steps', '30 epochs', '1e6 examples', '5%' of the run, or steps.
Duration = Annotated[str | int, 'a duration']
# Sizes of a model that a config may leave None, to be filled in from the data.
LEFT_OPEN = {'num_classes': 'classes', 'vocab_size': 'ids in its vocabulary'}
STANDARD = 'standard'  # `Optim.parametrization` without muP
MAX_STEPS = 2**31 - 1  # the state counts them in an int32
MAX_EVAL_SHARE = 10  # evaluations take at most one tenth of the time
TRAIN_TO_EVAL = 3  # a backward pass costs about two forward passes
COOLDOWNS = ('line', 'product')
# Methods of `config.lora`, and whether they have a rank.
LORA_METHODS = {'lora': True, 'vera': True, 'ia3': False, 'bitfit': False, 'prompts': False}
LORA_LAYERS = ('(query|value)/kernel$',)
POSEMBS = ('bilinear', 'bicubic', 'antialiased')

_FROM = {'key': 'from'}  # metadata of a field whose key is a keyword of Python
_UNITS = {'step': 'steps', 'epoch': 'epochs', 'example': 'examples', '%': '%'}
_DIRECTIONS = ('max', 'min')
_SEEDS = 2**63  # JAX takes a signed number of 64 bits


def at_least(bound: float, **values: float | None) -> None:
    """Raise UserError for a value below a bound, or not finite; None passes."""
    for key, value in values.items():
        fits = isinstance(value, int | float) and bound <= value < math.inf
        if value is not None and not fits:
            raise UserError(f'{key}={value!r}: must be at least {bound}')


def require(condition: bool, problem: str) -> None:
    """Raise UserError with `problem`, which begins with a key and its value, unless it fits."""
    if not condition:
        raise UserError(problem)


def require_tuples(**values: Any) -> None:
    """Raise UserError for a text in place of a tuple of patterns."""
    for key, value in values.items():
        require(not isinstance(value, str), f'{key}={value!r}: write a tuple, ({value!r},)')


def parse_duration(text: str | int, key: str = 'duration') -> tuple[float, str]:
    """`'300 epochs'` -> (300.0, 'epochs'). Units: steps (the default), epochs, examples, %.

    Raises:
      UserError: if `text` is not a duration, or is negative.
    """
    number, *unit_text = str(text).replace('%', ' %').split() or ['0']
    unit = _UNITS.get(' '.join(unit_text).removesuffix('s')) if unit_text else 'steps'
    try:
        amount = float(number.replace('_', ''))
    except ValueError:
        amount = math.nan
    if unit is None or not 0 <= amount < math.inf:
        raise UserError(f"{key}={text!r}: write '100 steps', '30 epochs', '1e6 examples' or '5%'")
    return amount, unit


@dataclass(frozen=True)
class Durations:
    """Converts durations to steps of this run; `batch_size` counts examples."""

    batch_size: float
    epoch_size: int
    total_steps: int = 0

    @classmethod
    def of(cls, total: Duration, batch_size: float, epoch_size: int) -> Durations:
        """Return the durations of a run of length `total`.

        Args:
          total: `config.total`.
          batch_size: Examples in a step, for durations in examples.
          epoch_size: Examples in an epoch, for durations in epochs.

        Raises:
          UserError: if the state of a run cannot count that many steps.
        """
        steps = cls(batch_size, epoch_size).steps(total, 'config.total')
        if steps > MAX_STEPS:
            raise UserError(f'config.total={total!r}: {steps:.3g} steps are more than 2**31 - 1')
        return cls(batch_size, epoch_size, steps)

    def steps(self, text: Duration, key: str = 'duration') -> int:
        """Return the number of steps, at least 1 unless the duration is empty or zero.

        Raises:
          UserError: for text that is not a duration, or a share of an unknown total.
        """
        amount, unit = parse_duration(text, key)
        if unit == '%' and not self.total_steps:
            raise UserError(f'{key}={text!r}: the total cannot be given in % of itself')
        scale = {
            'steps': 1.0,
            'epochs': self.epoch_size / self.batch_size,
            'examples': 1 / self.batch_size,
            '%': self.total_steps / 100,
        }[unit]
        return max(1, round(amount * scale)) if amount else 0

    def between_evals(self, examples: int) -> int:
        """Return the default steps between evaluations of this many examples; see `Every`."""
        cheap = MAX_EVAL_SHARE * examples / (TRAIN_TO_EVAL * self.batch_size)
        return max(self.steps('10%'), math.ceil(cheap))


@dataclass(frozen=True)
class Goal:
    """A metric of an evaluation, to be maximized or minimized.

    Attributes:
      metric: An entry of `config.evals` and its metric, such as `test/accuracy`.
      lower: Whether lower is better.
    """

    metric: str
    lower: bool = False

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Return whether a value is better than another by more than `by`; NaN never is."""
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return (than - value if self.lower else value - than) > by

    def __str__(self) -> str:
        return f'{"lowest" if self.lower else "highest"} {self.metric}'


def parse_goal(text: str, key: str) -> Goal:
    """Parse `'test/accuracy'` or `'max:test/accuracy'` (higher is better) or `'min:test/loss'`.

    Raises:
      UserError: for another direction, or a name that is not ENTRY/METRIC; begins with `key`.
    """
    direction, colon, metric = text.rpartition(':')
    if colon and direction not in _DIRECTIONS:
        raise UserError(f'{key}={text!r}: {nearest("direction", direction, _DIRECTIONS)}')
    entry, _, name = metric.partition('/')
    if not (entry and name):
        raise UserError(
            f'{key}={text!r}: name an evaluation and its metric, such as test/accuracy, or '
            'min:test/loss if lower is better'
        )
    return Goal(metric, direction == 'min')


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model; its other keys are the fields of its class."""

    # module of `vit_jax.models`, or the dotted name of your own; None for the model of
    # `config.init.from`, with any other keys of `config.model` replaced
    name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task; its other keys are the fields of its class."""

    name: str  # module of `vit_jax.tasks`, or the dotted name of your own
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set and how its batches are made."""

    source: str  # name of the data, see `vit_jax.data.sources`
    # selection of examples, such as 'train[:90%]'; None, in the evaluations too, chooses among the
    # source's splits, see `vit_jax.inference.fine_tune`
    split: str | None
    classes: tuple[int, ...] | None = None  # only classes to take, numbered from 0 in this order
    # applied to each example, such as 'inception_crop(224)|flip'; `{size}`, `{method}`,
    # `{transforms}` and `{alpha}` are taken from the checkpoint `config.init.from`
    transforms: str = ''
    # file of a subword vocabulary or a tokenizer.json, which encodes texts; 'bytes' for their bytes
    vocab: str | None = None
    buckets: tuple[int, ...] | None = None  # lengths in tokens that sequences are padded to
    # tokens that `batch_size` counts in training: 'padded', all slots of one side, or 'target',
    # without padding
    count: str = 'padded'
    # heights and widths in pixels that images of different sizes are padded to
    sizes: tuple[tuple[int, int], ...] | None = None
    # your own plan instead of `buckets` and `sizes`, such as 'my_lab.packing(length=256)'; see
    # `vit_jax.data.plans`
    plan: str | None = None
    # reading processes; 0 reads in threads. By default one for every CPU core but one, if there are
    # at least four and the CPU time that examples take, which is measured, is worth their start;
    # else 0
    workers: int | None = None
    # batches made at the same time in each process; by default one in each of several processes,
    # and one a CPU core, at most 8, where there are none
    threads: int | None = None
    cache: bool = False  # keep examples in memory; after the transforms, if none of them is random
    stall_seconds: float = 1800.0  # time in which a batch has to be read; 0 for no limit

    def __post_init__(self) -> None:
        at_least(0, workers=self.workers, threads=self.threads, stall_seconds=self.stall_seconds)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Data):
    """An entry of `config.evals`; other keys are declared by its evaluator."""

    evaluator: str | None = None  # name of the evaluator; if None, the task evaluates
    fit: str | None = None  # split that an evaluator learns from
    every: Duration | None = None  # interval that replaces `config.every.eval`
    batch_size: int | None = None  # batch size that replaces `config.batch_size`
    # decay of the average to evaluate, one of `config.step.ema_decay`; 0 for the parameters
    # themselves, None for the first average
    ema_decay: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate, or another number, as a function of the steps already taken.

    It rises linearly from `init` at step 0 to its peak at step `warmup`, follows its shape, and in
    the last `cooldown` steps falls to `final`.
    """

    # `constant`; `linear`, `cosine` or `polynomial`, which reach `final` at the end of the run;
    # `stair`, multiplied by `factor` from each of `boundaries` on (He et al. 2016, section 3.4); or
    # `rsqrt`, the reciprocal square root peak * sqrt(timescale / (timescale + steps since the
    # warm-up)), which with a cooldown gives a finished model at any length (Zhai et al. 2022,
    # "Scaling Vision Transformers", section 3.4) and with timescale = warmup is Vaswani et al.
    # 2017, equation 3
    name: str = 'constant'
    warmup: Duration = 0  # length of the warm-up
    cooldown: Duration = 0  # length of the cooldown
    # `line`, straight to `final` from the value at its start; or `product`, in which the shape goes
    # on falling and its distance from `final` is multiplied by a ramp from 1 to 0, as in the code
    # of Zhai et al. (big_vision)
    cooldown_form: str = 'line'
    timescale: Duration = 10_000  # timescale of `rsqrt`
    boundaries: Sequence[Duration] = ()  # steps of `stair` from the start of training, rising
    factor: float = 0.1  # factor of `stair`, in (0, 1]
    # exponent of `polynomial`, in which the distance from `final` shrinks as the share of the steps
    # that are left, to this power (Chen et al. 2018, arXiv:1606.00915, section 4.1)
    power: float = 0.9
    init: float = 0.0  # value at step 0, if there is a warm-up
    final: float = 0.0  # value at the end of the run, if anything decays to it

    def __post_init__(self) -> None:
        if self.cooldown_form not in COOLDOWNS:
            raise UserError('cooldown_form: ' + nearest('form', self.cooldown_form, COOLDOWNS))
        require(self.power > 0, f'power={self.power}: must be positive')
        at_least(0, init=self.init, final=self.final)
        if self.name == 'stair':
            require(0 < self.factor <= 1, f'factor={self.factor}: must be in (0, 1]')


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimizer, its parameter groups and its schedule; other keys are the optimizer's own.

    Optimizers that define weight decay (`adamw`, `lion`, `lamb`, ...) apply it in their own way. In
    AdamW a step subtracts lr(t) * weight_decay * parameter, as in Loshchilov & Hutter 2019 and
    `torch.optim.AdamW`; Adafactor is made to do the same. The others (`sgd`, `adam`, ...) get the
    L2 penalty of `torch.optim.SGD`: weight_decay * parameter is added to the clipped gradient.

    Patterns are regular expressions that may match anywhere in a parameter's path. Multipliers of
    the learning rate scale the whole update of a parameter, weight decay included, as parameter
    groups do in PyTorch. If several patterns match a path, the first counts.
    """

    # optimizer of Optax that takes a learning rate, or `adafactor_zhai` or `muon`. `amsgrad` takes
    # the maximum of the second moment after the correction of its bias, `torch.optim.Adam` before
    # it. `lars` does not adapt the rates of biases and scales, as in MAE's code (arXiv:2111.06377)
    name: str
    lr: float  # peak learning rate
    # 'standard', or muP with the widths of the model that the hyperparameters were tuned on, as
    # keywords of `config.model`: 'mup(width=64, mlp_dim=256, num_heads=1)'. Initial values,
    # learning rates and Adam's epsilon follow the width; see `vit_jax.optim.mup`
    parametrization: str = STANDARD
    schedule: Schedule = Schedule()  # schedule of the learning rate
    weight_decay: float = 0.0  # strength of weight decay
    # schedule of the weight decay, with `weight_decay` as its peak, such as
    # `dict(name='cosine', final=0.4)`
    decay_schedule: Schedule = Schedule()
    # pattern of the parameters that decay: by default the kernels of dense layers and convolutions,
    # not biases, norms, tokens, layer scales or any embeddings
    decay_mask: str = 'kernel$'
    decay_mults: Sequence[tuple[str, float]] = ()  # patterns, and multipliers of `weight_decay`
    lr_mults: Sequence[tuple[str, float]] = ()  # patterns, and multipliers of the learning rate
    # patterns, and durations until which their parameters stay as they are, such as
    # `(('/prototypes/', '1 epochs'),)`. The optimizer still follows their gradients. With a
    # third entry, such as `(('^encoder/', '500 steps', '1000 steps'),)`, the learning rate then
    # warms up for so long and follows `schedule` in the steps that are left
    lr_delays: Sequence[tuple[str, Duration] | tuple[str, Duration, Duration]] = ()
    # patterns of the parameters that stay as they are. They have no optimizer state, and their
    # gradients are not computed
    freeze: Sequence[str] = ()
    # ratio of a layer's learning rate to the next layer's, in (0, 1]; see
    # `param_groups.layer_scale`
    layer_decay: float | None = None
    clip_norm: float | None = None  # global norm above which the gradients are scaled down to it
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(0, lr=self.lr, weight_decay=self.weight_decay)
        for key, mults in (('decay_mults', self.decay_mults), ('lr_mults', self.lr_mults)):
            pairs = all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in mults)
            require(pairs, f'{key}={mults!r}: write ((pattern, multiplier), ...)')
            for pattern, mult in mults:
                at_least(0, **{f'{key} {pattern!r}': mult})
        delays = self.lr_delays
        rules = all(isinstance(rule, tuple | list) and len(rule) in (2, 3) for rule in delays)
        forms = '((pattern, delay), ...), or ((pattern, delay, warm-up), ...)'
        require(rules, f'lr_delays={delays!r}: write {forms}')
        require_tuples(freeze=self.freeze)
        if self.layer_decay is not None:
            fits = 0 < self.layer_decay <= 1
            require(fits, f'layer_decay={self.layer_decay}: must be in (0, 1]')
        if self.clip_norm is not None:
            fits = 0 < self.clip_norm < math.inf
            require(fits, f'clip_norm={self.clip_norm}: must be positive, or None for no clipping')


@dataclass(frozen=True, kw_only=True)
class Sam:
    """Sharpness-aware minimization: the gradient at the worst parameters nearby."""

    # distance between the parameters and those that the gradient is taken at; 0 for plain training.
    # GSAM's authors let it fall from 0.6 to 0.1 for a ViT-B/32
    rho: float = 0.0
    alpha: float = 0.0  # share of GSAM's second objective, the gap between both losses; 0 for SAM

    def __post_init__(self) -> None:
        at_least(0, rho=self.rho, alpha=self.alpha)
        require(not self.alpha or self.rho > 0, f'alpha={self.alpha}: needs a rho such as 0.1')

    @property
    def gradients(self) -> int:
        """Number of gradients that a step computes: 1 or 2."""
        return 2 if self.rho else 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One update of the parameters."""

    accum_steps: int = 1  # microbatches that a device takes one after the other
    # d in ema = d * ema + (1 - d) * params; 0 keeps no average, and several such as (0.999, 0.9999)
    # as many averages. Evaluations, predictions, samples and teachers take the first unless they
    # choose another: `config.evals.NAME.ema_decay`, `--average`
    ema_decay: float | Sequence[float] = 0.0
    # schedule of d, with each `ema_decay` as its peak, such as `dict(name='cosine', final=1.0)` for
    # a teacher that comes to rest
    ema_schedule: Schedule = Schedule()
    # whether d is at most (1 + t) / (10 + t) after t steps, so that the average of a short run does
    # not hold initial values; None for yes in a new run without `ema_schedule`. A run that began
    # without the key stays without
    ema_warmup: bool | None = None
    # step up to which an average equals the parameters, such as '80%' for a teacher that starts as
    # a copy of the student then. A warm-up and t count from there; a schedule does not
    ema_start: Duration = 0
    # successive steps that are skipped, before the run ends, because a metric is not finite. They
    # change only the step's number, which schedules follow
    max_skips: int = 0
    sam: Sam = Sam()  # sharpness-aware minimization; with a `rho`, a step computes two gradients
    sam_schedule: Schedule = Schedule()  # schedule of rho, with `sam.rho` as its peak

    def __post_init__(self) -> None:
        at_least(1, accum_steps=self.accum_steps)
        at_least(0, max_skips=self.max_skips)
        if isinstance(self.ema_decay, int | float):
            require(0 <= self.ema_decay < 1, f'ema_decay={self.ema_decay}: must be in [0, 1)')
        else:
            decays = self.ema_decay
            fits = decays and all(isinstance(d, float) and 0 < d < 1 for d in decays)
            distinct = len({*decays}) == len(decays)
            require(
                bool(fits and distinct), f'ema_decay={decays}: must be different numbers in (0, 1)'
            )

    @property
    def ema_decays(self) -> tuple[float, ...]:
        """Decays of all averages, the run's first; empty if it keeps none."""
        if isinstance(self.ema_decay, int | float):
            return (self.ema_decay,) if self.ema_decay else ()
        return tuple(self.ema_decay)


def average_key(decay: float) -> str:
    """Name an average in a state: 0.9999 -> '0_9999'."""
    return str(decay).replace('.', '_')


@dataclass(frozen=True, kw_only=True)
class Every:
    """Intervals of logging, evaluation and checkpoints; empty for never."""

    log: Duration = '1%'  # interval of training metrics
    # interval of the evaluations in `config.evals` that set no `every`; None for a tenth of
    # the run, or less often to keep them below a tenth of the time, assuming that evaluating an
    # example costs a third of training on it
    eval: Duration | None = None
    checkpoint: Duration = '10%'  # interval of saves
    # interval of pictures or tables for the writers, with results of the first evaluation of
    # `config.evals`: a few examples with their predictions, and the attention in the first of them;
    # also with its last results
    examples: Duration = '25%'

    def __post_init__(self) -> None:
        require(parse_duration(self.log)[0] > 0, f'log={self.log!r}: must be positive')


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints to keep."""

    keep_last: int = 2  # number of newest steps to keep, at least 1
    keep_every: Duration = 0  # interval of steps that are kept for good; 0 for none
    keep_steps: Sequence[Duration] = ()  # further steps to save and keep, to branch off from
    # metric of an evaluation such as `test/accuracy`, or `min:test/loss` if lower is better: the
    # step with the best value is saved when evaluated and kept until another is better;
    # `--step best` reads it. Empty for none
    keep_best: str = ''

    def __post_init__(self) -> None:
        at_least(1, keep_last=self.keep_last)
        parse_duration(self.keep_every, 'keep_every')
        if self.keep_best:
            parse_goal(self.keep_best, 'keep_best')


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Layout of arrays on the devices."""

    strategy: str = 'jit'  # `jit` or `pmap`
    fsdp: int = 1  # devices of a slice over which parameters and optimizer state are split
    tensor: int = 1  # size of the axis that `rules` may name, also within a slice
    # number of TPU slices, between which only gradients and metrics are exchanged; None for the
    # slices of the devices. Other devices are divided into as many parts
    slices: int | None = None
    # (regex over the parameter's path, a mesh axis or None for each dimension)
    rules: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    min_split_size: int = 2**14  # arrays with fewer elements are replicated under fsdp


@dataclass(frozen=True, kw_only=True)
class Init:
    """Checkpoint that the run takes its first parameters from."""

    # checkpoint of another code base (a file, a folder, a URL such as
    # hf://google/vit-base-patch16-224, a name of `list checkpoints`) or a run folder; empty for
    # none; None if the user has to name one
    checkpoint: str | None = field(default='', metadata=_FROM)
    # interpolation for resizing its position embedding: 'bilinear' (vision_transformer), 'bicubic'
    # (transformers) or 'antialiased' bicubic (timm); if empty, as in the checkpoint's code base
    posemb: str = ''
    select: str = ''  # parts to load, see `vit_jax.interop.adapt.select_params`; empty for all
    # with `config.model.name=None`, the model to make of the checkpoint's ViT, such as 'eomt'. It
    # keeps the ViT's fields and parameters and adds its own. By default the checkpoint's model
    into: str = ''
    # file with the checkpoint's class for each class of the run, one number a line, from 0, which
    # selects rows of its head. If empty, a head with as many classes is kept, and any other starts
    # anew
    classes: str = ''

    def __post_init__(self) -> None:
        if self.posemb and self.posemb not in POSEMBS:
            raise UserError('posemb: ' + nearest('method', self.posemb, POSEMBS))
        if self.classes and self.checkpoint == '':
            raise UserError(
                f'classes={self.classes}: there is no checkpoint with these classes; name one, as '
                '--config.init.from=FILE, or leave them out'
            )


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Run whose whole state is continued."""

    # run folder, or RUN@STEP or RUN@best for one of its kept steps; empty for none
    folder: str = field(default='', metadata=_FROM)
    step: int = 0  # kept step; 0 for the one that `from` names


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters that fine-tune the checkpoint `config.init.from`; see `vit_jax.optim.lora`.

    Only they, the head and the parameters of `train` have gradients, and are saved. The checkpoint
    is read again when the run resumes or is loaded, and has to be the same, by its digest.
    """

    # `lora`; `vera`, which trains two vectors between random matrices of `rank`; `ia3`, factors of
    # outputs, and of the inputs of `fc2`; `bitfit`, all biases; `prompts`, `model.registers` tokens
    method: str = 'lora'
    rank: int = 0  # columns of A; 0 for no adapters, or a method without a rank
    alpha: float | None = None  # A B is multiplied by alpha / rank; None for `rank`
    # patterns of the kernels that are adapted. The parts of fused projections have paths of their
    # own, such as `block_0/attention/query/kernel`. `ia3` adapts keys, values and `fc2` by default
    layers: Sequence[str] = LORA_LAYERS
    train: Sequence[str] = ()  # patterns of further parameters to train, such as `('norm',)`
    dora: bool = False  # whether each output has a magnitude, as in DoRA

    def __post_init__(self) -> None:
        at_least(0, rank=self.rank)
        require(self.alpha is None or self.alpha > 0, f'alpha={self.alpha}: must be positive')
        require_tuples(layers=self.layers, train=self.train)
        if self.method not in LORA_METHODS:
            raise UserError(nearest('method', self.method, LORA_METHODS))
        has_rank, given = LORA_METHODS[self.method], f'method={self.method!r}'
        require(has_rank or not self.rank, f'{given}: has no rank; leave rank out')
        require(self.rank > 0 or self.method != 'vera', f'{given}: set rank, such as 256')
        is_lora = self.method == 'lora'
        require(is_lora or not self.dora, f'{given}: dora is an option of lora')
        require(is_lora or self.alpha is None, f'{given}: alpha is an option of lora')

    @property
    def is_used(self) -> bool:
        """Whether the run trains adapters."""
        return self.rank > 0 or not LORA_METHODS[self.method]

    @property
    def scale(self) -> float:
        """Factor of A B."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """End of a run before its total, if its evaluations no longer improve."""

    # metric of an evaluation such as `test/accuracy`, or `min:test/loss` if lower is better; empty
    # for no early stop
    metric: str = ''
    patience: int = 5  # successive evaluations without improvement that end the run
    min_delta: float = 0.0  # smallest improvement that counts, in units of the metric

    def __post_init__(self) -> None:
        if self.metric:
            parse_goal(self.metric, 'metric')
        at_least(1, patience=self.patience)
        at_least(0, min_delta=self.min_delta)


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Part of a run that evaluation and prediction read; checkpoints of others have it, too."""

    seed: int = 0  # random seed
    batch_size: int  # examples of a global batch; tokens if the data are sequences in buckets
    model: Model  # the model and its sizes
    task: Task  # the task, which defines the loss
    data: Data  # the training data
    # one group per evaluation; its source and vocabulary default to `data`'s
    evals: Mapping[str, Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size)
        seeds = 'must be 0 or more, and less than 2**63'
        require(0 <= self.seed < _SEEDS, f'seed={self.seed}: {seeds}')


@dataclass(frozen=True, kw_only=True)
class Run(Inference):
    """A run, from its data to its last checkpoint; groups are its sections."""

    total: Duration  # length of the run
    optim: Optim  # the optimizer, its parameter groups and its schedule
    step: Step = Step()  # accumulation, averaging and skipping in an update
    every: Every = Every()  # intervals of logging, evaluation and checkpoints
    checkpoint: Checkpoint = Checkpoint()  # the checkpoints to keep
    parallel: Parallel = Parallel()  # the layout of arrays on the devices
    init: Init = Init()  # the checkpoint that the run takes its first parameters from
    branch: Branch = Branch()  # the run whose whole state is continued
    lora: Lora = Lora()  # adapters, which are trained instead of the whole model
    early_stop: EarlyStop = EarlyStop()  # condition for ending the run before its total
    # receivers of the metrics besides the run folder: `tensorboard`, `wandb`, `mlflow`, `trackio`,
    # or dotted names of your own modules, see `vit_jax.writers`
    writers: tuple[str, ...] = ('tensorboard',)

    def __post_init__(self) -> None:
        super().__post_init__()
        amount, _ = parse_duration(self.total, 'total')
        require(amount > 0, f'total={self.total!r}: must be positive')
        if self.branch.folder and self.init.checkpoint:
            raise UserError('init.from: a run starts from config.branch or config.init, not both')
        if self.lora.rank or self.lora.method != 'lora':
            self._check_adapters()
        for name, entry in self.evals.items():
            if entry.ema_decay not in (None, 0, *self.step.ema_decays):
                raise UserError(
                    f'evals.{name}.ema_decay={entry.ema_decay}: not a decay of '
                    f'config.step.ema_decay={self.step.ema_decay}'
                )

    def _check_adapters(self) -> None:
        lora = self.lora
        rank = f'lora.rank={lora.rank}' if lora.rank else f'lora.method={lora.method}'
        if self.init.checkpoint == '':
            raise UserError(f'{rank}: adapters need a checkpoint: name it by config.init.from')
        if self.step.ema_decay:
            raise UserError(f'{rank}: adapters are not averaged: set config.step.ema_decay=0')
        if self.optim.parametrization != STANDARD:
            raise UserError(f'{rank}: adapters have no muP: leave config.optim.parametrization out')
