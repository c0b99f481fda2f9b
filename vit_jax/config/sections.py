"""Other names of what is in `schema`."""

from vit_jax.config.schema import arguments as fields
from vit_jax.config.schema import keywords

__all__ = ['fields', 'keywords']
EXAMPLES = ('source', 'split', 'classes', 'transforms', 'vocab', 'buckets')
LOADING = ('workers', 'threads', 'cache', 'stall_seconds')
