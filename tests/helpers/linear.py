"""A run on digits that costs little: where its model is not what is tested.

    vit_jax train --config tests/helpers/linear.py

It drops pixels and averages its parameters. It mixes no images, for how they are drawn takes longer
to compile than all the rest.
"""

import flax.linen as nn
from ml_collections import ConfigDict

from experiments.vit import digits
from vit_jax.models import base as models
from vit_jax.nn.stochastic import Dropout


class Model(models.Model):
    """Logits [B, num_classes] of images [B H W C], some of whose pixels are dropped."""

    num_classes: int
    dropout: float = 0.1
    bias: bool = True

    @nn.compact
    def __call__(self, image, train=False):
        pixels = Dropout(self.dropout)(image.reshape(len(image), -1), train)
        return {'logits': nn.Dense(self.num_classes, self.bias, name='head')(pixels)}


def get_config(arg: str | None = None) -> ConfigDict:
    """The smoke size of the digits, but for the model."""
    config = digits.get_config()
    digits.smoke(config)
    config.model = ConfigDict(
        {'name': 'helpers.linear', 'num_classes': config.model.get_ref('num_classes')}
    )
    config.task.mixup = 0.0
    return config
