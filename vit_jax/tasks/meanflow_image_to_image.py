"""Images from images in one or a few steps: `image_to_image` by average velocities."""

from __future__ import annotations

import dataclasses

from vit_jax.tasks import image_to_image, meanflow


@dataclasses.dataclass(frozen=True)
class Task(image_to_image.Task, meanflow.Task):
    """Task `meanflow` with gray or small images in the model's input, and without classes.

    Attributes:
      sampler, steps: See `meanflow`.
      guidance_range: See `meanflow`; 0, since there are no classes to guide by.
    """

    sampler: str = 'euler'
    steps: int = 1
    guidance_range: float = 0.0
