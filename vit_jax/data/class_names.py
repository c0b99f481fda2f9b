"""Class names: one spelling for each, and the same classes in all splits of a data set.

Folders copied from macOS spell é with two characters, others with one. A class that occurs only in
the evaluation split counts as wrong whatever a model predicts.
"""

from __future__ import annotations

import collections
import unicodedata
from collections.abc import Collection, Iterable, Mapping

from vit_jax.data import listing
from vit_jax.errors import UserError, one_line

TRAINING = ('train', 'training')


def compose(name: str) -> str:
    """Compose the letters of a name (NFC), so that spellings that look the same are equal."""
    return name if name.isascii() else unicodedata.normalize('NFC', name)


def join_spellings(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its class: of equal-looking spellings the composed one, or the first."""
    spellings = collections.defaultdict(set)
    for name in names:
        spellings[compose(name)].add(name)
    return {
        name: composed if composed in group else min(group)
        for composed, group in spellings.items()
        for name in group
    }


def find_alike(names: Iterable[str], references: Collection[str]) -> tuple[str, str] | None:
    """Return the first name that differs only in case from a reference, and this reference."""
    folded = {other.casefold(): other for other in references}
    pairs = ((name, folded.get(name.casefold())) for name in names if name not in references)
    return next(((name, other) for name, other in pairs if other is not None), None)


def join_splits(
    by_split: Mapping[str, Collection[str]], split: str, title: str, several: bool = False
) -> set[str]:
    """Join the classes of all splits, which share one numbering.

    A split whose only class is missing from training, such as a folder `images`, has no classes.

    Args:
      by_split: Class names of each split.
      split: Split to read.
      title: Name of the data, for messages.
      several: Whether an example may have any number of classes instead of one.

    Returns:
      The class names, of all splits if none is for training; empty if `split` has no classes.

    Raises:
      UserError: if two splits, or a class of a split and one of training, differ only in case, or
        if training has none of the classes of `split`.
    """
    _require_distinct(by_split, title)
    train = next((name for name in by_split if name.casefold() in TRAINING), None)
    if train is None:
        return set().union(*by_split.values())
    train_classes = set(by_split[train])
    joined = set(train_classes)
    for name, classes in by_split.items():
        unknown = sorted(set(classes) - train_classes)
        if pair := find_alike(unknown, train_classes):
            raise UserError(
                f'{title}: {name!r} has a class {pair[0]!r}, {train!r} a class {pair[1]!r}; give '
                'both the same name'
            )
        if not unknown or len(unknown) < len(classes):
            joined |= set(unknown)
        elif name == split and len(unknown) == 1 and not several:
            _warn(title, split, f'is read without classes: {train!r} lacks its only class', unknown)
            return set()
        elif name == split:
            raise UserError(
                f'{title}: {split!r} has the classes {_quote_first(unknown)}, {train!r} none of '
                'them; rename them, or read the split as a separate data set'
            )
    if unknown := sorted(set(by_split[split]) - train_classes):
        _warn(title, split, f'has classes that {train!r} lacks', unknown)
    return joined


def _require_distinct(splits: Iterable[str], title: str) -> None:
    """Raise UserError for a split under two names, one of which would be ignored."""
    names: dict[str, str] = {}
    for name in splits:
        folded = name.casefold()
        other = names.setdefault(TRAINING[0] if folded in TRAINING else folded, name)
        if other != name:
            raise UserError(f'{title}: has splits {other!r} and {name!r}; give both the same name')


def _warn(title: str, split: str, problem: str, names: list[str]) -> None:
    listing.warn_once(f'{title}: the split {split!r} {problem}: {_quote_first(names)}')


def _quote_first(names: list[str]) -> str:
    more = ', ...' if len(names) > 3 else ''
    return one_line(', '.join(map(repr, names[:3]))) + more
