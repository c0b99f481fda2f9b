"""Models of the table of released checkpoints."""

import importlib

import jax
import jax.numpy as jnp


def count(model: dict, image_size: int) -> int:
    """Parameters of a model of the table, from shapes alone."""
    keywords = dict(model)
    module = importlib.import_module(f'vit_jax.models.{keywords.pop("name")}')
    variant = keywords.pop('variant')
    scan = {'scan': True} if 'scan' in module.Model.__dataclass_fields__ else {}
    made = module.Model(**module.variant(variant), **keywords, **scan)
    image_size -= image_size % (made.stride or 1)  # patches that an image cuts off are left out
    images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
    rest = (jax.ShapeDtypeStruct(images.shape[:3], bool),) if 'detr' in module.__name__ else ()
    shapes = jax.eval_shape(made.init, jax.random.key(0), images, *rest)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes['params']))
