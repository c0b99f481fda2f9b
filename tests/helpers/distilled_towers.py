"""Tiny models of two towers with heads of prototypes, computed part by part."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.pictures import images_like
from vit_jax.models import dinov2

SHAPE = {'patch_size': 2, 'width': 8, 'depth': 1, 'mlp_dim': 12, 'num_heads': 2}
TEXTS = {'text_width': 8, 'text_depth': 1, 'text_mlp_dim': 12, 'text_num_heads': 2}
WORDS = {'vocab_size': 11, 'length': 5}
HEADS = {'image': 6, 'patch': 5, 'hidden': 8, 'bottleneck': 4}


def captions(rows, seed):
    """Random token ids, the last of them padding."""
    ids = np.random.default_rng(seed).integers(3, 11, (rows, 5)) * (np.arange(5) < 4)
    return jnp.asarray(ids, jnp.int32)


def batch(rows):
    """Images, a global and three local views of each, and captions."""
    return {
        'image': images_like(rows, 8, 8, 3, seed=2),
        'global_image': images_like(rows, 1, 8, 8, 3),
        'local_image': images_like(rows, 3, 4, 4, 3, seed=1),
        'caption': captions(rows, 0),
    }


def tower_of(params):
    """Parameters of the image tower with its token of hidden patches."""
    return {**params['image'], 'mask_token': params['mask']['token']}


def masks_of(model, params, views, keys):
    """Masks of the global views, drawn by the second call of the model in a step."""
    rngs = {name: jax.random.fold_in(key, 1) for name, key in keys.items()}
    options = {'masked': 1, 'ratios': (0.5, 0.5), 'method': 'block_masks', 'rngs': rngs}
    return model.apply({'params': params}, views['image'], **options)


class Comparing:
    """A tower and heads, called one by one, as a model for the task `dinov2`.

    Args:
      student, teacher: Parameters.
      masks: of the global views.
      tower: Module of the images.
      prefix: Number of tokens before the patches.
      gelu: of the heads.
    """

    train, step, frozen = True, jnp.int32(0), {}

    def __init__(self, student, teacher, masks, tower, prefix, gelu):
        self.student, self.teacher, self.masks = student, teacher, masks
        self.tower, self.prefix, self.gelu = tower, prefix, gelu

    def __call__(self, images, *, method=None, masked=None, places=None, **options):
        if method:
            return self.masks
        return self.compare(self.student, images, masked, places)

    def average(self, images, *, places):
        return self.compare(self.teacher, images, None, places)

    def compare(self, params, images, masked, places):
        outputs = self.tower.apply({'params': tower_of(params)}, images, masked=masked)
        patches = outputs['tokens'][:, self.prefix :]
        if places is None:
            places = jnp.zeros((len(images), 1), int)
        rows = patches.reshape(len(places), -1, patches.shape[-1])
        picked = jnp.stack([row[place] for row, place in zip(rows, places, strict=True)])
        scores = {
            name: dinov2.Head(HEADS[kind], 4, 8, gelu=self.gelu).apply({'params': params[head]}, x)
            for name, kind, head, x in (
                ('scores', 'image', 'dino_head', outputs['pre_logits']),
                ('patch_scores', 'patch', 'ibot_head', picked),
            )
        }
        return {'pre_logits': outputs['pre_logits'], 'patches': patches, **scores}
