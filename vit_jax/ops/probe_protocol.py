"""How linear probes of patches are trained."""

from __future__ import annotations

import math
from typing import NamedTuple


class Protocol(NamedTuple):
    """How a linear layer is trained.

    Attributes:
      steps: Steps of AdamW.
      images: Images per step.
      learning_rate: Highest learning rate.
      weight_decay: Weight decay, of all parameters.
      warmup: Steps of linear warm-up.
      b2: Decay rate of AdamW's second moments.
      decay: 'linear' or 'cosine' decay to 0.
      clip: Largest norm of the gradient.
      norm: Whether features are normalized by batch norm.
      upsample: Factor by which depths are interpolated before bins are averaged.
      pixels: Random rows, and columns, of pixels in each step's loss; 0 for all.
      class_token: Whether the class token is appended to each patch.
      deepest: Largest depth that counts; infinite for the largest of the fit split.
      uniform: Whether initial values are uniform, as of PyTorch's layers, instead of normal.
      mean_steps: First steps whose loss of depth has only the mean error, not the variance.
      eigen_crop: Whether depth is measured only within `eigen_crop` of an image.
      flip: Whether to average predictions over the image and its mirror image.
    """

    steps: int
    images: int
    learning_rate: float
    weight_decay: float
    warmup: int
    b2: float = 0.999
    decay: str = 'linear'
    clip: float = math.inf
    norm: bool = True
    upsample: int = 1
    pixels: int = 0
    class_token: bool = False
    deepest: float = math.inf
    uniform: bool = False
    mean_steps: int = 0
    eigen_crop: bool = False
    flip: bool = False
