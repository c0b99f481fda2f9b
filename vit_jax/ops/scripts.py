"""Writing systems: which one a text is written in, for tools that split texts by language."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

# First and last code point of blocks of letters. Chinese characters are also part of Japanese.
_BLOCKS = {
    'japanese': ((0x3040, 0x30FF), (0xFF66, 0xFF9D)),
    'chinese': ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
    'unspaced': ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),  # Thai to Khmer
}
_SAMPLE = 1000  # texts
_JAPANESE_SHARE = 0.05  # of kana among Chinese characters and kana


def main_script(texts: Iterable[str]) -> str:
    """Return the script of most letters in the first texts.

    Returns:
      'chinese', 'japanese', 'unspaced' for Thai, Lao, Burmese and Khmer, or 'spaced' for all
      others, which put spaces between words.
    """
    counts = collections.Counter(
        _script(letter)
        for text in itertools.islice(texts, _SAMPLE)
        for letter in text
        if letter.isalpha()
    )
    kana, characters = counts.pop('japanese', 0), counts.pop('chinese', 0)
    east_asian = 'japanese' if kana > _JAPANESE_SHARE * (kana + characters) else 'chinese'
    counts[east_asian] = kana + characters
    script, count = counts.most_common(1)[0]
    return script if count else 'spaced'


def _script(letter: str) -> str:
    if letter < '\u0e00':
        return 'spaced'
    for script, blocks in _BLOCKS.items():
        if any(first <= ord(letter) <= last for first, last in blocks):
            return script
    return 'spaced'
