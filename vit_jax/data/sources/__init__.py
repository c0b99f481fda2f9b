"""Sources of examples, opened by a name and a split.

Names: `digits`, `scenes`, `scenes_captions`, `scenes_panoptic`, `prompts:JSON`, `coco:PATH`,
`coco_captions:PATH`, `panoptic:PATH`, `tfds:NAME`, `folder:PATH`, `table:FILE`, `hf:PATH`,
`tar:PATTERN`, `packed:PATH`, `text:PATH`, `synthetic:TASK`, or a dotted module of your own with a
class `Source(path, split)`, see `vit_jax.data.records.Source`. Splits follow TFDS: `train`,
`train[:90%]`, `train[100:200]`, `train+test`, and `train[:5 per class]` (see
`vit_jax.data.splits`).
"""

from __future__ import annotations

from vit_jax.data.records import BrokenRecord, Record, Source, SourceInfo
from vit_jax.data.splits import Subset, select
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import resolve

__all__ = ['BrokenRecord', 'Record', 'Source', 'SourceInfo', 'Subset', 'open_source', 'own_vocab']


def open_source(name: str, split: str) -> Subset:
    """The examples that `split` selects of the source `name`.

    Args:
      name: `digits`, `tfds:cifar10`, `folder:/data/flowers`, `text:/data/train.en,train.de`,
        `my_lab.sources.foo:PATH`.
      split: a split expression, for example `train[:90%]`.

    Raises:
      UserError: if the source, the split or its slice does not exist or is empty.
    """
    module, _, path = name.partition(':')
    source_class = resolve('vit_jax.data.sources', module, 'Source')
    return select(name, split, lambda base: source_class(path, base))


def own_vocab(name: str) -> Tokenizer | None:
    """The tokenizer of a source whose sequences are ids, not text; else None.

    It is read from the class `Source`, attribute `vocab`, without opening any data.

    Raises:
      UserError: if the source does not exist.
    """
    source_class = resolve('vit_jax.data.sources', name.partition(':')[0], 'Source')
    return getattr(source_class, 'vocab', None)
