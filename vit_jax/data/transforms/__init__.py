"""What happens to an example on its way to the batch, as one line of text.

    inception_crop(224)|flip|randaugment(2, 15)

is read by `parse_transforms`. A name stands for a function marked `@transform` in a module of
this package, or, dotted (`my_lab.augment.solarize(128)`), in one of the user's own:

    from vit_jax.data.transforms import transform

    @transform
    def solarize(threshold):
        return lambda image: np.where(image < threshold, image, 255 - image)

It is called once, with the arguments given in the text; it checks them (ValueError) and
returns the function that is applied to each example:

    apply(record), apply(record, rng)   returns the new record. One that moves pixels moves
                                        what lies in the image with them, by `geometry`.
    apply(image), apply(image, rng)     changes the pixels of uint8 [H, W, C] where they are, of
                                        each frame of a clip by the same draws; another size is
                                        refused where boxes, masks, points or anything else lies
                                        in the image.

Where `predict` reads a file, the record has an image and no more. A transform of labels and the
like is left out there if `@of_annotations` stands under its `@transform`.

Nothing is changed in place. `rng` is a `numpy.random.Generator` of this example alone, valid
until the call returns.
"""

from vit_jax.data.transforms.parse import Transforms, parse_transforms, without_annotations
from vit_jax.data.transforms.registry import of_annotations, transform

__all__ = [
    'Transforms',
    'of_annotations',
    'parse_transforms',
    'transform',
    'without_annotations',
]
