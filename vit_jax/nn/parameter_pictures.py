"""What a model has learned, as pictures of its parameters, in one form for every model."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class ParameterPictures(NamedTuple):
    """Small pictures of one parameter.

    A model lists them by `parameter_pictures(params)`; `attention --parameters` draws them.

    Attributes:
      name: path of the parameter, such as `stage_0/block_1/attention/position_bias`.
      pictures: numbers of either sign [N h w], or colours [N h w 3] of any range.
      each: what one of them is, a word: 'head', 'patch', 'filter'.
      caption: what they show, in a few words.
      columns: in which they stand side by side, where they are a grid themselves; 0 where not.
    """

    name: str
    pictures: Float[np.ndarray, 'N h w'] | Float[np.ndarray, 'N h w 3']
    each: str
    caption: str = ''
    columns: int = 0
