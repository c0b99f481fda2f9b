"""Image classification: softmax or sigmoid cross entropy, mixup and CutMix on the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from vit_jax.array_types import Bool, Float, Num
from vit_jax.errors import UserError, check_choice, resolve_function
from vit_jax.ops import sequences
from vit_jax.ops.sequences import Normalization, Sequences
from vit_jax.ops.terms import Term, hits
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums

BALANCED = 'balanced'
Label = Num[Array, 'B *C']  # class index, or multi-hot


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict one label per image; with the sigmoid loss any number of them.

    Multiple labels are multi-hot vectors. Their accuracy is the share of images whose most probable
    class is one of the labels, among images with a label; see the evaluator `several_labels`.

    Attributes:
      loss_name: `softmax` or `sigmoid` cross entropy (the latter one-vs-rest, as in
        Beyer et al. 2020, "Are we done with ImageNet?"), `asymmetric` for several labels (see
        `asymmetric_loss`), or a function of one's own, `my_lab.losses.focal`, of logits and
        targets [B, C] to losses [B].
      label_smoothing: Share of the target spread evenly over all classes.
      mixup: Alpha of mixup's Beta distribution, 0 for none (Zhang et al. 2018).
      cutmix: Alpha of CutMix (Yun et al. 2019); if both are on, each batch gets one at random.
      class_weights: Loss weight of each class in training: a number per class, or 'balanced' for
        1 / (K s), where s is the class's share of the training images and K the number of classes
        with images. The loss is divided by the number of images; evaluation is unweighted. Of
        several labels, the numbers weigh the images that have the class, like `pos_weight` of
        PyTorch's BCEWithLogitsLoss.
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
    """

    loss_name: str = 'softmax'
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    class_weights: tuple[float, ...] | str | None = None
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    rngs = ('dropout',)
    classifies = True
    inert = (*base.Task.inert, 'class_weights')
    multiple_reason = 'mixup and cutmix mix pairs'

    def __post_init__(self) -> None:
        find_loss(self.loss_name)
        self.require('label_smoothing', 0 <= self.label_smoothing < 1, 'in [0, 1)')
        self.require('mixup', self.mixup >= 0, 'at least 0')
        self.require('cutmix', self.cutmix >= 0, 'at least 0')
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')
        if isinstance(self.class_weights, str):
            check_choice('config.task.class_weights', self.class_weights, [BALANCED])
        elif self.class_weights is not None:
            valid = min(self.class_weights, default=-1) >= 0 < max(self.class_weights) < math.inf
            self.require('class_weights', valid, 'numbers of at least 0, one of them positive')

    def for_data(self, num_classes: int, shares: np.ndarray | None) -> Task:
        """Return the task with numbers as class weights.

        Raises:
          UserError: if the data have no class counts, or a different number of classes.
        """
        weights = self.class_weights
        if weights is None:
            return self
        if isinstance(weights, str):
            if shares is None:
                raise UserError(
                    "config.task.class_weights='balanced': the data have no class counts; set one "
                    'number per class'
                )
            weights = balanced_weights(shares)
        if len(weights) != num_classes:
            raise UserError(
                f'config.task.class_weights has {len(weights)} numbers, but the data have '
                f'{num_classes} classes'
            )
        return dataclasses.replace(self, class_weights=weights)

    @property
    def weighs_classes(self) -> bool:
        return self.class_weights is not None

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.std else None

    @property
    def multiple(self) -> int:
        """Required divisor of the rows per device: 2 if `augment` mixes pairs."""
        return 2 if self.mixup > 0 or self.cutmix > 0 else 1

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C'] | Sequences]:
        """Return scaled images, or sequences of their patches."""
        return (sequences.from_batch(batch, self.value_range, self.normalization),)

    def augment(self, key: jax.Array, batch: Batch) -> Batch:
        """Mix each example with its neighbor; add the neighbor's label and the weight.

        Raises:
          UserError: if the images to mix differ in size.
        """
        if self.multiple == 1:
            return batch
        if 'patches' in batch:
            raise UserError(
                'mixup and cutmix need images of the same size, but these are patches of several '
                'sizes: set config.task.mixup and config.task.cutmix to 0'
            )
        coin, lam_key, box_key = jax.random.split(key, 3)
        image = sequences.to_range(batch['image'], self.value_range, self.normalization)
        mixes = [
            mix(lam_key, box_key, image, alpha)
            for mix, alpha in ((mixup, self.mixup), (cutmix, self.cutmix))
            if alpha > 0
        ]
        use_first = jax.random.bernoulli(coin) if len(mixes) == 2 else True
        image, weight = jax.tree.map(lambda a, b: jnp.where(use_first, a, b), mixes[0], mixes[-1])
        neighbor_label = sequences.neighbor(batch['label'])
        weight = jnp.full(neighbor_label.shape[:1], weight)
        return {**batch, 'image': image, 'label_other': neighbor_label, 'label_weight': weight}

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the examples: `loss`, and the metric `accuracy`."""
        logits, label = outputs['logits'], batch['label']
        losses = self._weighted_losses(logits, label)
        if 'label_other' in batch:
            weight, other = batch['label_weight'], batch['label_other']
            losses = weight * losses + (1 - weight) * self._weighted_losses(logits, other)
        mask, correct = self.mask(batch), _hits(logits, label)
        labeled = mask * _has_label(label)
        return {
            'loss': Term((losses * mask).sum(), mask.sum()),
            'accuracy': Term((correct * labeled).sum(), labeled.sum(), weight=0.0),
        }

    def _weighted_losses(self, logits: Float[Array, 'B C'], label: Label) -> Float[Array, ' B']:
        if not isinstance(self.class_weights, tuple):  # 'balanced' before `for_data`
            return self._losses(logits, label)
        weights = jnp.asarray(self.class_weights, jnp.float32)
        if label.ndim == 1:
            return self._losses(logits, label) * weights[label]
        return self._losses(logits, label, weights)

    def _losses(
        self,
        logits: Float[Array, 'B C'],
        label: Label,
        positive_weights: Float[Array, ' K'] | None = None,
    ) -> Float[Array, ' B']:
        target = self._target(label, logits.shape[-1])
        target = optax.smooth_labels(target, self.label_smoothing)
        loss = find_loss(self.loss_name)
        if positive_weights is None:
            return loss(logits, target)
        # Weights have no output for classes that the data lack.
        missing = logits.shape[-1] - len(positive_weights)
        weights = jnp.pad(positive_weights, (0, missing), constant_values=1)
        if self.loss_name not in WEIGHTED_LOSSES:
            raise UserError(
                f'config.task.class_weights of several labels needs a loss_name of '
                f'{", ".join(WEIGHTED_LOSSES)}, not {self.loss_name}'
            )
        return WEIGHTED_LOSSES[self.loss_name](logits, target, weights)

    def _target(self, label: Label, num_classes: int) -> Float[Array, 'B C']:
        if label.ndim == 1:
            return jax.nn.one_hot(label, num_classes)
        if self.loss_name == 'softmax':
            raise UserError(
                'a softmax loss needs one class per image, but these have several or none: set '
                "config.task.loss_name='sigmoid'"
            )
        if label.shape[-1] > num_classes:
            raise UserError(f'the data have {label.shape[-1]} classes, but the model {num_classes}')
        num_padding = num_classes - label.shape[-1]  # outputs without a class in the data
        return jnp.pad(label.astype(jnp.float32), ((0, 0), (0, num_padding)))

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over the real examples; padding has mask 0."""
        logits, label = self.outputs(apply, batch)['logits'], batch['label']
        mask = self.mask(batch)
        labeled = mask * _has_label(label)
        losses = dataclasses.replace(self, label_smoothing=0.0)._losses(logits, label)
        return {
            'loss': (jnp.sum(losses * mask), jnp.sum(mask)),
            'accuracy': (jnp.sum(_hits(logits, label) * labeled), jnp.sum(labeled)),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return class probabilities `probs` [B, C], and `features` [B, D], the head's input."""
        outputs, predictions = self.outputs(apply, batch), {}
        if 'logits' in outputs:
            probabilities = PROBABILITIES.get(self.loss_name, jax.nn.softmax)
            predictions['probs'] = probabilities(outputs['logits'])
        if 'pre_logits' in outputs:
            predictions['features'] = outputs['pre_logits'].astype(jnp.float32)
        return predictions


def balanced_weights(shares: np.ndarray) -> tuple[float, ...]:
    """Compute weights that balance the classes, 1 on average over the examples.

    Args:
      shares: Share or number of examples of each class; a class without examples has weight 1.
    """
    is_present = shares > 0
    weights = np.ones(len(shares))
    weights[is_present] = shares.sum() / (is_present.sum() * shares[is_present])
    return tuple(weights.tolist())


def _hits(logits: Float[Array, 'B C'], label: Label) -> Float[Array, ' B']:
    """1 where the highest logit belongs to the label, or to one of several labels."""
    if label.ndim == 1:
        return hits(logits, label)
    highest = logits.argmax(-1)
    is_label = jnp.take_along_axis(label, highest[:, None], -1, mode='fill', fill_value=0)[:, 0]
    return hits(logits, jnp.where(is_label == 1, highest, -1))


def _has_label(label: Label) -> Float[Array, ' B']:
    """1 for images with at least one label, whose accuracy is defined."""
    if label.ndim == 1:
        return jnp.ones(label.shape, jnp.float32)
    return jnp.any(label > 0, axis=-1).astype(jnp.float32)


def find_loss(name: str) -> Callable[[Array, Array], Array]:
    """Return the loss of logits and targets [B, C] that `config.task.loss_name` names.

    Raises:
      UserError: if there is no such loss, or a dotted name such as `my_lab.losses.focal` is not a
        function of a module.
    """
    if '.' in name:
        return resolve_function(name, 'config.task.loss_name')
    check_choice('config.task.loss_name', name, LOSSES)
    return LOSSES[name]


def softmax_loss(logits: Float[Array, 'B C'], target: Float[Array, 'B C']) -> Float[Array, ' B']:
    """-sum_c target_c log softmax(logits)_c, in nats."""
    return optax.softmax_cross_entropy(logits, target)


def sigmoid_loss(
    logits: Float[Array, 'B C'],
    target: Float[Array, 'B C'],
    positive_weights: Float[Array, ' C'] | float = 1.0,
) -> Float[Array, ' B']:
    """Binary cross entropy of each class against the rest, summed over classes, in nats."""
    present = positive_weights * target * jax.nn.log_sigmoid(logits)
    absent = (1 - target) * jax.nn.log_sigmoid(-logits)
    return -(present + absent).sum(-1)


def asymmetric_loss(
    logits: Float[Array, 'B C'],
    target: Float[Array, 'B C'],
    positive_weights: Float[Array, ' C'] | float = 1.0,
) -> Float[Array, ' B']:
    """Asymmetric loss for several labels, summed over classes, in nats.

    -y (1 - p) log p - (1 - y) q^4 log(1 - q), with q = max(p - 0.05, 0), so that the easy
    negatives, of which each image has many, weigh little (Ridnik et al., 2021, arXiv:2009.14119,
    equations 4 to 7). As in the authors' code, the factors 1 - p and q^4 have no gradient.
    """
    probs = jax.nn.sigmoid(logits)
    shifted = jnp.maximum(probs - 0.05, 0.0)
    weight_present, weight_absent = jax.lax.stop_gradient((1 - probs, shifted**4))
    present = positive_weights * target * weight_present * jax.nn.log_sigmoid(logits)
    absent = (1 - target) * weight_absent * jnp.log1p(-shifted)
    return -(present + absent).sum(-1)


LOSSES = {'softmax': softmax_loss, 'sigmoid': sigmoid_loss, 'asymmetric': asymmetric_loss}
WEIGHTED_LOSSES = {'sigmoid': sigmoid_loss, 'asymmetric': asymmetric_loss}
PROBABILITIES = {
    'softmax': jax.nn.softmax,
    'sigmoid': jax.nn.sigmoid,
    'asymmetric': jax.nn.sigmoid,
}


def mixup(
    lam_key: jax.Array, _: jax.Array, image: Float[Array, 'B H W C'], alpha: float
) -> tuple[Float[Array, 'B H W C'], jax.Array]:
    """Mix with one lambda ~ Beta(alpha, alpha) per batch, at least 1/2: `label` dominates."""
    lam = jax.random.beta(lam_key, alpha, alpha)
    lam = jnp.maximum(lam, 1 - lam)
    return sequences.pair_mix(image, lam), lam


def cutmix(
    lam_key: jax.Array, box_key: jax.Array, image: Float[Array, 'B H W C'], alpha: float
) -> tuple[Float[Array, 'B H W C'], jax.Array]:
    """Paste a box of the neighbor into each image; lambda is the share that remains."""
    lam = jax.random.beta(lam_key, alpha, alpha)
    is_inside = random_box(box_key, (image.shape[1], image.shape[2]), jnp.sqrt(1 - lam))
    mixed = jnp.where(is_inside[..., None], sequences.neighbor(image), image)
    return mixed, 1 - is_inside.mean()


def random_box(key: jax.Array, size: tuple[int, int], side: Float[Array, '']) -> Bool[Array, 'H W']:
    """Draw a box of `side` times height and width around a random center, clipped to the image."""

    def span(n: int, center: jax.Array) -> jax.Array:
        middle, half = center * n, side * n / 2
        index = jnp.arange(n)
        return (index >= jnp.floor(middle - half)) & (index < jnp.floor(middle + half))

    y, x = jax.random.uniform(key, (2,))
    return span(size[0], y)[:, None] & span(size[1], x)[None, :]
