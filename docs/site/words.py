"""Count the handwritten words of each page of docs/: `python docs/site/words.py`.

Words are what stands between spaces, those of tables and code too. Generated are config.md,
config/, flags.md, moving_configs.md, and tables between a comment with their name and one that
begins with `end`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
GENERATED_PAGES = ('config.md', 'flags.md', 'moving_configs.md')
GENERATED_FOLDER = DOCS / 'config'
GENERATED_TABLE = re.compile(r'<!-- (?!end)[^>]+ -->\n.*?<!-- end[^>]* -->\n', re.DOTALL)


def count() -> dict[str, int]:
    """The words of each page and of the notebook's texts."""
    pages = [page for page in sorted(DOCS.rglob('*.md')) if not is_generated(page)]
    counts = {str(page.relative_to(DOCS)): count_words(page.read_text()) for page in pages}
    cells = json.loads((DOCS / 'tour.ipynb').read_text())['cells']
    texts = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
    return {**counts, 'tour.ipynb': sum(map(count_words, texts))}


def is_generated(page: Path) -> bool:
    """Tell whether a command writes the whole page."""
    return page.name in GENERATED_PAGES or page.parent == GENERATED_FOLDER


def count_words(text: str) -> int:
    """The words of a page without its generated tables and the rules and bars of others."""
    words = GENERATED_TABLE.sub('', text).split()
    return sum(any(letter.isalnum() for letter in word) for word in words)


if __name__ == '__main__':
    counts = count()
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        print(f'{number:7,}  {name}')
    print(f'{sum(counts.values()):7,}  in all')
