"""Sources of examples, opened by a name and a split.

Names: `digits`, `endless`, `scenes`, `scenes_captions`, `scenes_depth`, `scenes_normals`,
`scenes_panoptic`, `prompts:JSON`, `coco:PATH`, `yolo:PATH`, `voc:PATH`, `coco_captions:PATH`,
`coco_masks:PATH`, `panoptic:PATH`, `masks:PATH`, `depth:PATH`, `tfds:NAME`, `folder:PATH`,
`table:FILE`, `hf:PATH`, `tar:PATTERN`, `packed:PATH`, `text:PATH`, `synthetic:TASK`, or a dotted
user module with a class `Source(path, split)`, see `vit_jax.data.records.Source`.
Splits follow TFDS: `train`, `train[:90%]`, `train[100:200]`, `train+test`, and `train[:5 per
class]` (see `vit_jax.data.splits`). 'folder:a*0.7+folder:b*0.3' is a mixture: training draws 70% of
the images from the first source, and evaluation reads every image once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from vit_jax.data.records import BrokenRecord, Record, Source, SourceInfo, UnknownSplit
from vit_jax.data.splits import Subset, mix, select
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError, modules, resolve
from vit_jax.signatures import parse_sources

__all__ = ['BrokenRecord', 'Record', 'Source', 'SourceInfo', 'Subset', 'open_source', 'own_vocab']

FILES = {'table': ('.csv', '.parquet'), 'tar': ('.tar',)}  # suffixes; else a folder
UNWEIGHTED = re.compile(r'\+[a-z_.]+:')  # a second source without a weight


def open_source(name: str, split: str) -> Subset:
    """Open the examples that `split` selects from the source `name`.

    Args:
      name: Source such as `digits`, `tfds:cifar10`, `folder:/data/flowers`,
        `text:/data/train.en,train.de` or `my_lab.sources.foo:PATH`, or a mixture.
      split: Split expression, such as `train[:90%]`.

    Raises:
      UserError: if the source, the split or its slice does not exist or is empty.
    """
    terms = parse_sources(name)
    if len(terms) > 1:
        opened = [(source, weight, open_source(source, split)) for source, weight in terms]
        return mix(f'{name} {split}', opened)
    path = name.partition(':')[2]
    source_class = _find_source_class(name)
    try:
        return select(name, split, lambda base: source_class(path, base))
    except UnknownSplit:
        raise
    except UserError as error:
        if not UNWEIGHTED.search(name):
            raise
        hint = "a mixture needs a weight after each source, such as 'folder:a*0.7+folder:b*0.3'"
        raise UserError(f'{error}; {hint}') from error


def own_vocab(name: str) -> Tokenizer | None:
    """Return the tokenizer of a source whose sequences are ids, not text; else None.

    It is the attribute `vocab` of the class `Source`, so no data are opened.

    Raises:
      UserError: if the source does not exist.
    """
    return getattr(_find_source_class(name), 'vocab', None)


def _find_source_class(name: str) -> Callable[[str, str], Source]:
    """Find the class `Source` for a source's name.

    Raises:
      UserError: if it does not exist; for a path the message suggests the prefix to add.
    """
    package, module = 'vit_jax.data.sources', name.partition(':')[0]
    path = os.path.expanduser(module)
    if os.sep in path or (os.path.exists(path) and module not in modules(package)):
        kind = next((kind for kind, ends in FILES.items() if name.endswith(ends)), 'folder')
        raise UserError(f'source {name!r}: to read this path, write {kind}:{name}')
    return resolve(package, module, 'Source')
