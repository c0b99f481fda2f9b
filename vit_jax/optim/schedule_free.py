"""Schedule-free optimizers: Defazio et al., 2024, arXiv:2405.15682.

Training takes gradients at y, between the iterates z, which the optimizer moves, and their average
x, which evaluations and checkpoints use. A constant learning rate then does as well as a schedule
that ends at zero, at any length of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax import contrib

from vit_jax.config.run import Run
from vit_jax.errors import UserError
from vit_jax.signatures import parameters

PyTree = Any
Mask = Callable[[Any], Any]


def schedule_free_adamw(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_lr_power: float = 2.0,
) -> optax.GradientTransformation:
    """AdamW for schedule-free training, where averaging takes the place of momentum.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay, of the parameters that are trained (y).
      mask: Function from parameters to whether they decay; by default all do.
      b1: Weight of the average in the parameters that are trained; above 0.
      b2: Decay rate of the second moment.
      eps: Number added to the denominator.
      weight_lr_power: Power of the largest learning rate so far that weighs a step in the average.
    """
    del b1, weight_lr_power  # of `averaging`
    return optax.chain(
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def schedule_free_sgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask | None = None,
    *,
    b1: float = 0.9,
    weight_lr_power: float = 2.0,
) -> optax.GradientTransformation:
    """Gradient descent for schedule-free training.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decay, of the parameters that are trained (y).
      mask: Function from parameters to whether they decay; by default all do.
      b1: Weight of the average in the parameters that are trained; above 0.
      weight_lr_power: Power of the largest learning rate so far that weighs a step in the average.
    """
    del b1, weight_lr_power  # of `averaging`
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )


def averaging(
    tx: optax.GradientTransformation,
    rate: optax.Schedule,
    constructor: Callable,
    options: Mapping[str, Any],
) -> optax.GradientTransformation:
    """Train at points between the iterates of `tx` and their average.

    Args:
      tx: Updates of the iterates, whatever their rates by path.
      rate: Learning rate by the number of previous updates.
      constructor: Optimizer of this module, with defaults of the options.
      options: `b1` and `weight_lr_power`, unless they have their defaults.
    """
    b1, power = (
        options.get(key, parameters(constructor)[key].default) for key in ('b1', 'weight_lr_power')
    )
    # Optax's count begins at 1.
    return contrib.schedule_free(tx, lambda count: rate(count - 1), b1, power)


def average_of(run: Run) -> Callable[[PyTree, PyTree], PyTree]:
    """Return `evaluated`, the only average of its run.

    Raises:
      UserError: if the run keeps another average, or has adapters.
    """
    for key, value in (('step.ema_decay', run.step.ema_decay), ('lora.rank', run.lora.rank)):
        if value:
            raise UserError(
                f'config.{key}={value}: {run.optim.name} averages the parameters itself: set 0'
            )
    return evaluated


def evaluated(opt_state: PyTree, params: PyTree) -> PyTree:
    """Return the average x, for evaluation; see `optax.contrib.schedule_free_eval_params`.

    Parameters without an iterate in the state, and those that equal it, stay exactly as they are.
    """

    def is_free(node: Any) -> bool:
        return isinstance(node, contrib.ScheduleFreeState)

    (state,) = filter(is_free, jax.tree.leaves(opt_state, is_leaf=is_free))

    def average(iterate: Any, param: jax.Array) -> jax.Array:
        if isinstance(iterate, optax.MaskedNode):
            return param
        return (param + (1 / state.b1 - 1) * (param - iterate)).astype(param.dtype)

    return jax.tree.map(
        average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
