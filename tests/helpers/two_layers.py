"""A model of two layers with `pre_logits`, which evaluators of features need."""

import flax.linen as nn

from vit_jax.models import base as models
from vit_jax.nn.stochastic import Dropout


class Model(models.Model):
    """Logits [B, num_classes] and features [B, width] of images [B H W C]."""

    num_classes: int
    width: int = 32
    dropout: float = 0.1

    @nn.compact
    def __call__(self, image, train=False):
        pixels = Dropout(self.dropout)(image.reshape(len(image), -1), train)
        features = nn.relu(nn.Dense(self.width)(pixels))
        return {'pre_logits': features, 'logits': nn.Dense(self.num_classes, name='head')(features)}
