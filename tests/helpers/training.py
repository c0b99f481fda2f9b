"""`python -m helpers.training`: ten steps of AdamW and SGD here and in torch, family by family."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.flatten_util import ravel_pytree

from helpers import (
    detr,
    eomt,
    lw_detr,
    rf_detr,
    transformers_clip,
    transformers_forms,
    transformers_siglip,
    transformers_swin,
    transformers_swin_v2,
    transformers_texts,
    vit_mae,
)
from vit_jax import interop
from vit_jax.interop import names
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.eomt import ENCODER
from vit_jax.ops import terms
from vit_jax.tasks import detect

STEPS, RATE, DECAY = 10, 1e-3, 0.05
EPS = 1e-6  # AdamW's 1e-8 would magnify gradients that are rounding alone, of single weights
Loss = Callable[[Any], Any]


class Case(NamedTuple):
    """A model of torch and its loss on a fixed batch, and the same here.

    Attributes:
      make: the model, in the mode for evaluation, so that nothing is dropped.
      theirs: its loss.
      ours: from the model that was read to the loss of its parameters.
      frozen: pattern of parameters that get no update, in either.
      without: pattern of parameters without a gradient but for rounding, which AdamW amplifies.
      rounded: whether training amplifies rounding, so that torch's own results in float32 differ
        from those in float64 by more than `Result.is_close` allows.
      rate: of the optimizers.
    """

    make: Callable[[], Any]
    theirs: Loss
    ours: Callable[[TrainedModel], Loss]
    frozen: str = '^$'
    without: str = r'/key/bias$|kv/bias$'
    rounded: bool = False
    rate: float = RATE


class Result(NamedTuple):
    """Largest relative difference of a loss, and of the parameters by the norm of their update."""

    loss: float
    params: float

    def is_close(self, rounding: Result | None = None) -> bool:
        """Whether it is small, or at most three times what float32 changes in torch's results."""
        loss, params = rounding or (0.0, 0.0)
        return self.loss < max(1e-4, 3 * loss) and self.params < max(1e-3, 3 * params)


def optimizers(
    rate: float = RATE, eps: float = 1e-8
) -> Mapping[str, tuple[Callable[[Any], Any], optax.GradientTransformation]]:
    """Each optimizer in torch, given its parameters, and here."""
    import torch

    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    return {
        'AdamW': (
            lambda parameters: adamw(parameters, lr=rate, eps=eps, weight_decay=DECAY),
            optax.adamw(rate, eps=eps, weight_decay=DECAY),
        ),
        'SGD': (
            lambda parameters: sgd(parameters, lr=rate, momentum=0.9),
            optax.sgd(rate, momentum=0.9),
        ),
    }


def compare(case: Case) -> dict[str, Result]:
    """The differences after ten steps from the same parameters, by optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        case.make().save_pretrained(folder)
        trained = interop.read(folder)
        start, unravel = ravel_pytree(jax.tree.map(jnp.asarray, trained.params))
        loss = case.ours(trained)
        mask = _mask(trained, case.frozen)
        with jax.default_matmul_precision('highest'):
            gradient = jax.jit(jax.value_and_grad(lambda vector: loss(unravel(vector))))
            found = {}
            for name, (theirs, ours) in optimizers(case.rate, EPS).items():
                losses, after = _train_torch(case, theirs, folder)
                made, vector = train(gradient, start, ours, mask)
                relative = np.abs(np.array(made) / np.array(losses) - 1).max()
                params = difference(trained, unravel(vector), after, case)
                found[name] = Result(float(relative), params)
    return found


def rounding(case: Case) -> dict[str, Result]:
    """What float32 changes in torch after the same ten steps, by optimizer."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        case.make().save_pretrained(folder)
        start = interop.read(folder)
        exact = case._replace(make=lambda: _in_float64(case.make()))
        for name, (theirs, _) in optimizers(case.rate, EPS).items():
            (losses, after), (exactly, expected) = (
                _train_torch(each, theirs, folder) for each in (case, exact)
            )
            relative = np.abs(np.array(losses) / np.array(exactly) - 1).max()
            params = difference(start, after.params, expected, case)
            found[name] = Result(float(relative), params)
    return found


def _in_float64(model: Any) -> Any:
    """The model, which takes its inputs in float32 all the same."""

    def widened(_: Any, args: Any, kwargs: Any) -> Any:
        def wide(x: Any) -> Any:
            return x.double() if getattr(x, 'is_floating_point', bool)() else x

        return tuple(map(wide, args)), {key: wide(value) for key, value in kwargs.items()}

    made = model.double()
    made.register_forward_pre_hook(widened, with_kwargs=True)
    return made


def _mask(trained: TrainedModel, frozen: str) -> Any:
    """1 for parameters that are trained and 0 for frozen ones, as one vector."""
    flat = flatten_dict(trained.params, sep='/')
    ones = {
        name: np.full(array.shape, not re.search(frozen, name), np.float32)
        for name, array in flat.items()
    }
    return ravel_pytree(unflatten_dict(ones, sep='/'))[0]


def _train_torch(
    case: Case, optimizer: Callable[[Any], Any], folder: str
) -> tuple[list[float], TrainedModel]:
    model, losses = case.make(), []
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    for _ in range(STEPS):
        made.zero_grad()
        loss = case.theirs(model)
        loss.backward()
        made.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses, interop.read(folder)


def train(
    gradient: Any, start: Any, optimizer: optax.GradientTransformation, mask: Any
) -> tuple[list[float], Any]:
    """Take the steps here; `mask` is 1 for parameters that are trained."""
    vector, state, losses = start, optimizer.init(start), []
    for _ in range(STEPS):
        loss, slope = gradient(vector)
        update, state = optimizer.update(slope, state, vector)
        vector = optax.apply_updates(vector, update * mask)
        losses.append(float(loss))
    return losses, vector


def difference(before: TrainedModel, ours: Any, theirs: TrainedModel, case: Case) -> float:
    """The largest difference of an array, by the norm of its update."""
    no_bias = before.model_config.get('no_bias', '')  # of the encoder
    old, new, other = (
        names.flatten({key: x for key, x in params.items() if key in ENCODER}, no_bias)
        | names.flatten({key: x for key, x in params.items() if key not in ENCODER})
        for params in (before.params, ours, theirs.params)
    )
    return max(
        float(np.linalg.norm(new[name] - other[name]) / np.linalg.norm(other[name] - old[name]))
        for name in old
        if not re.search(f'{case.frozen}|{case.without}', name)
    )


def target(shape: Any) -> np.ndarray:
    """Random numbers to regress."""
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def batch(*shape: int) -> np.ndarray:
    """Random numbers of this shape."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def tensor(array: Any) -> Any:
    """The array for torch."""
    import torch

    return torch.from_numpy(np.array(array))


def pixels(images: np.ndarray) -> Any:
    """Images [B H W C] for torch, [B C H W]."""
    return tensor(images.transpose(0, 3, 1, 2))


def _regression(
    make: Callable[[], Any], images: np.ndarray, theirs: str, ours: str, **more: Any
) -> Case:
    """The mean squared difference of an output to random numbers."""

    def of_torch(model: Any) -> Any:
        output = model(pixels(images))[theirs]
        return (output - tensor(target(tuple(output.shape)))).square().mean()

    def of_ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            output = trained.model.apply({'params': params}, jnp.asarray(images))[ours]
            return jnp.square(output - target(output.shape)).mean()

        return loss

    return Case(make, of_torch, of_ours, **more)


def _form(name: str, **fields: Any) -> Case:
    """A form of `transformers_forms`."""
    form = next(
        form
        for form in transformers_forms.FORMS
        if form.model == name and fields.items() <= {**form.fields}.items()
    )

    def make() -> Any:
        return transformers_forms.model(form)

    return _regression(make, batch(3, 12, 12, 3), form.theirs, form.ours)


def _bit(depths: Sequence[int], **more: Any) -> Case:
    def make() -> Any:
        import transformers

        from helpers.transformers_models import perturbed

        config = transformers.BitConfig(
            layer_type='preactivation',
            depths=list(depths),
            hidden_sizes=[256 * 2**stage for stage in range(len(depths))],
            num_labels=5,
        )
        return perturbed(transformers.BitForImageClassification(config))

    return _regression(make, batch(2, 32, 32, 3), 'logits', 'logits', rounded=True, **more)


def _swin(helper: Any, rounded: bool = False, **fields: Any) -> Case:
    images = batch(3, 24, 24, 3)
    return _regression(
        lambda: helper.reference(**fields), images, 'logits', 'logits', rounded=rounded
    )


def _mae() -> Case:
    images, noise = batch(3, 12, 12, 3), np.random.default_rng(2).random((3, 9))
    noise = noise.astype(np.float32)

    def ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            outputs = trained.model.apply(
                {'params': params}, jnp.asarray(images), jnp.asarray(noise)
            )
            found = trained.task.loss(outputs, {'image': jnp.asarray(images)})
            return terms.total(found, terms.means(found))

        return loss

    return Case(
        lambda: vit_mae.reference(norm_pix_loss=True),
        lambda model: model(pixels(images), noise=tensor(noise)).loss,
        ours,
        frozen='pos_embed$',
    )


def _pairs(make: Callable[[], Any], data: Mapping[str, np.ndarray]) -> Case:
    """A model of images and texts, by its own loss."""
    images, ids = batch(*data['image'].shape), data['caption']

    def ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            outputs = trained.model.apply({'params': params}, jnp.asarray(images), jnp.asarray(ids))
            found = trained.task.loss(outputs, {'image': images, 'caption': jnp.asarray(ids)})
            return terms.total(found, terms.means(found))

        return loss

    def theirs(model: Any) -> Any:
        words = tensor(ids).long()
        return model(input_ids=words, pixel_values=pixels(images), return_loss=True).loss

    return Case(make, theirs, ours)


def _texts(name: str, **fields: Any) -> Case:
    def make() -> Any:
        return transformers_texts.reference(name, fields)

    ids = transformers_texts.ids()
    wanted = np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)

    def theirs(model: Any) -> Any:
        found = model(input_ids=tensor(ids).long())
        output = found['text_embeds' if 'text_embeds' in found else 'pooler_output']
        return (output - tensor(wanted)).square().mean()

    def ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            output = trained.model.apply({'params': params}, jnp.asarray(ids))['logits']
            return jnp.square(output - wanted).mean()

        return loss

    return Case(make, theirs, ours)


def _object_labels(data: Any) -> list[dict[str, Any]]:
    """The objects of each image, as transformers' detectors take them."""
    targets = detect.make_targets(data)
    return [
        {
            'class_labels': tensor(targets.labels[i][real]).long(),
            'boxes': tensor(targets.boxes[i][real]),
        }
        for i, real in enumerate(np.asarray(targets.real))
    ]


def _rf_detr(make: Callable[[], Any], frozen: str = '^$') -> Case:
    """With its loss of all groups, blocks and the first stage."""
    data = rf_detr.batch()

    def theirs(model: Any) -> Any:
        return model(**detr.tensors(data), labels=_object_labels(data)).loss

    def ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            inputs = data['image'], data['pixel_mask']
            outputs = trained.model.apply({'params': params}, *inputs, train=True)
            found = trained.task.loss(outputs, data)
            return terms.total(found, terms.means(found))

        return loss

    return Case(make, theirs, ours, frozen)


def _detr() -> Case:
    """With its loss of the last block; transformers' losses of the others are of other outputs.

    Norms, root and first stage are frozen, as by the authors; transformers freezes all stages of a
    ResNet of its own, against its comment.
    """
    data = detr.batch()

    def make() -> Any:
        made = detr.reference()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(
                not re.search(r'backbone.*(embedder\.|stages\.0\.|normalization)', name)
            )
        return made

    def theirs(model: Any) -> Any:
        return model(**detr.tensors(data), labels=_object_labels(data)).loss

    def ours(trained: TrainedModel) -> Loss:
        def loss(params: Any) -> Any:
            outputs = trained.model.apply({'params': params}, data['image'], data['pixel_mask'])
            found = trained.task.loss(outputs, data)
            last = {name: term for name, term in found.items() if not name.startswith('aux_')}
            return terms.total(last, terms.means(last))

        return loss

    # The first block of the decoder attends to zeros, so that its weights have no effect.
    zeros = '^decoder/block_0/attention/(query/|key/|value/kernel)|/key/bias$'
    frozen = '^backbone/(root|stage_0)/|^backbone/.*norm'
    # At the others' rate, AdamW amplifies the rounding of kernels that are scaled before they act.
    return Case(make, theirs, ours, frozen, zeros, rate=3e-4)


def _eomt(dinov3: bool = False) -> Case:
    """With masked attention, and its loss of all predictions at the points that are drawn here."""
    data = eomt.batch()
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
    masked = jnp.ones(eomt.SHAPE['num_blocks'])

    def theirs(model: Any) -> Any:
        with eomt.GivenPoints(model, keys, 1 + len(masked)):
            return model(**eomt.inputs(data)).loss

    def ours(trained: TrainedModel) -> Loss:
        task = dataclasses.replace(trained.task, mean=eomt.TASK.mean, std=eomt.TASK.std)

        def loss(params: Any) -> Any:
            outputs = trained.model.apply(
                {'params': params},
                *task.inputs(data),
                mask_probs=masked,
                rngs={'mask': jax.random.key(0)},
            )
            found = task.loss({**outputs, 'keys': keys}, data)
            return terms.total(found, terms.means(found))

        return loss

    return Case(lambda: eomt.reference(dinov3), theirs, ours)


CASES: Mapping[str, Callable[[], Case]] = {
    'ViT': lambda: _form('ViTForImageClassification'),
    'DeiT, distilled': lambda: _form('DeiTForImageClassificationWithTeacher'),
    'DeiT': lambda: _form('DeiTModel'),
    'YOLOS, body': lambda: _form('YolosModel'),
    'MSN': lambda: _form('ViTMSNForImageClassification'),
    'I-JEPA': lambda: _form('IJepaForImageClassification'),
    'BEiT': lambda: _form('BeitForImageClassification'),
    'BEiT, shared biases': lambda: _form('BeitModel'),
    'DINOv2': lambda: _form('Dinov2ForImageClassification'),
    'DINOv2, SwiGLU': lambda: _form('Dinov2Model'),
    'DINOv2 with registers': lambda: _form('Dinov2WithRegistersForImageClassification'),
    'DINOv3': lambda: _form('DINOv3ViTModel', num_register_tokens=3),
    'DINOv3, gated': lambda: _form('DINOv3ViTModel', use_gated_mlp=True),
    'CLIP, images': lambda: _form('CLIPVisionModelWithProjection'),
    'SigLIP, images': lambda: _form('SiglipVisionModel'),
    'CLIP': lambda: _pairs(transformers_clip.reference, transformers_clip.batch()),
    'SigLIP': lambda: _pairs(transformers_siglip.reference, transformers_siglip.batch()),
    'CLIP, texts': lambda: _texts('CLIPTextModelWithProjection', projection_dim=5),
    'SigLIP, texts': lambda: _texts('SiglipTextModel', projection_size=5),
    'Swin': lambda: _swin(transformers_swin),
    'Swin, no biases': lambda: _swin(transformers_swin, qkv_bias=False),
    'Swin v2': lambda: _swin(transformers_swin_v2, rounded=True),
    'MAE': _mae,
    'DETR': _detr,
    'RF-DETR': lambda: _rf_detr(rf_detr.reference),
    'LW-DETR, two maps': lambda: _rf_detr(
        lw_detr.reference, r'^projector(_\d)?/(outer|block_\d|rescale_\d)/norm'
    ),
    'EoMT': _eomt,
    'EoMT, DINOv3': lambda: _eomt(dinov3=True),
    'BiT': lambda: _bit((1, 1)),
}
# Too dear for tests. At the others' rate, rounding makes torch's losses differ by their own size.
DEAR: Mapping[str, Callable[[], Case]] = {'BiT, R50x1': lambda: _bit((3, 4, 6, 3), rate=1e-5)}


if __name__ == '__main__':
    import sys
    import time

    for label in sys.argv[1:] or CASES:
        began, case = time.monotonic(), {**CASES, **DEAR}[label]()
        for found in (compare(case), *([rounding(case)] if case.rounded else [])):
            row = ' | '.join(f'{r.loss:.0e} | {r.params:.0e}' for r in found.values())
            print(f'| {label} | {row} | {time.monotonic() - began:.1f} s', flush=True)
