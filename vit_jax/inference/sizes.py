"""The size and range of the images that a checkpoint takes, and the arrays of one example."""

from __future__ import annotations

import numpy as np

from vit_jax.data.batches import ArraySpec, Spec
from vit_jax.errors import UserError
from vit_jax.interop import adapt, preprocessing
from vit_jax.interop.trained import Size, TrainedModel

RESNET_SIZE = (224, 224)


def input_size(trained: TrainedModel) -> Size:
    """Height and width of the images that a checkpoint gets.

    A ResNet takes images of any size. A ViT without a position embedding does not determine the
    number of its tokens, and a wrong one may exhaust the memory.

    Raises:
      UserError: if the size is unknown.
    """
    size = prepared_size(trained) or trained.image_size
    if size := size or (None if trained.model.stride else RESNET_SIZE):
        return size
    raise UserError(f'{trained.path}: the size of its images is unknown: give --image-size')


def prepared_size(trained: TrainedModel) -> Size | None:
    """Height and width that the files of another code base give all images, which may differ from
    those that the parameters were made for, as those of DINOv2 do; None if they say nothing.
    """
    recipe = None if trained.step is not None else preprocessing.recipe_of(trained.transforms)
    return recipe.made if recipe else None


def any_size(trained: TrainedModel) -> Size:
    """A size for a model whose parameters do not depend on it.

    Raises:
      UserError: if they do.
    """
    size = (trained.model.stride or 32,) * 2
    try:
        _, changes = adapt.resize(trained.params, trained.model, None, size)
    except UserError as error:
        changes = [str(error)]
    if changes:
        raise UserError(
            'the parameters are for images of one size, which is unknown '
            f'({changes[0]}): give the image size'
        )
    return size


def example_spec(trained: TrainedModel, size: Size) -> Spec:
    """The arrays of one example of the training data, with images of this size."""
    if 'image' not in trained.spec:
        return trained.spec or {'image': ArraySpec((*size, trained.channels), np.dtype(np.uint8))}
    before = trained.spec['image'].shape[:2]
    return {
        name: ArraySpec((*size, *s.shape[2:]), s.dtype) if s.shape[:2] == before else s
        for name, s in trained.spec.items()
    }


def own_normalization(trained: TrainedModel) -> str:
    """The range of a model's images, for people; empty if its task has no mean and deviation."""
    if trained.task.normalization is None:
        return ''
    mean, std = trained.task.normalization
    return (
        f'it takes images in [0, 1] less its mean {mean}, divided by its deviation {std}, not '
        'images in [-1, 1]'
    )
