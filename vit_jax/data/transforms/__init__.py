"""Transforms of an example, written as one line of text.

    inception_crop(224)|flip|randaugment(2, 15)

is read by `parse_transforms`. A name is a function marked `@transform` in a module of this package,
or, dotted (`my_lab.augment.solarize(128)`), in a user's module:

    from vit_jax.data.transforms import transform

    @transform
    def solarize(threshold):
        return lambda image: np.where(image < threshold, image, 255 - image)

It is called once, with the arguments in the text; it checks them (ValueError) and returns the
function to apply to each example:

    apply(record), apply(record, rng)   returns the new record. If it moves pixels, it moves boxes,
                                        masks and points with them, by `geometry`.
    apply(image), apply(image, rng)     returns changed pixels of uint8 [H, W, C]; all frames of a
                                        clip have the same draws. A new size is refused if the
                                        record has boxes, masks, points or other arrays of the
                                        image's size.

When `predict` reads a file, the record has only an image. Transforms of annotations, such as
labels, are then skipped if marked `@annotation_transform` below `@transform`. Transforms of texts
are marked `@text_transform` there: only they are applied to texts given to `predict`.

Inputs are never modified. `rng` is a `numpy.random.Generator` for this example, valid until the
call returns.
"""

from vit_jax.data.transforms.parse import (
    Transforms,
    only_text_transforms,
    parse_transforms,
    without_annotations,
)
from vit_jax.data.transforms.registry import annotation_transform, text_transform, transform

__all__ = [
    'Transforms',
    'annotation_transform',
    'of_annotations',
    'of_texts',
    'only_text_transforms',
    'parse_transforms',
    'text_transform',
    'transform',
    'without_annotations',
]

# Former names, for modules outside of this package.
of_annotations, of_texts = annotation_transform, text_transform
