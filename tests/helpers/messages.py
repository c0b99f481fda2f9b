"""What messages say, whatever their wording."""

from __future__ import annotations

import re
from collections.abc import Iterable


def says(text: str | Iterable[str], *facts: object) -> bool:
    """Whether a message is one line that has all of the facts; fails with those that it lacks.

    Args:
      text: the message, or a list with nothing but it.
      facts: words, names and numbers.
    """
    lines = text.splitlines() if isinstance(text, str) else list(text)
    missing = [str(fact) for fact in facts if str(fact) not in ''.join(lines)]
    assert len(lines) == 1, lines
    assert not missing, f'{missing} in {lines[0]!r}'
    return True


def mentions(text: str | Iterable[str], *facts: object) -> bool:
    """Whether one line of a text has all of the facts.

    Args:
      text: any output, or its lines.
      facts: words, names and numbers; a tuple gives several.
    """
    required = [
        str(item) for fact in facts for item in (fact if isinstance(fact, tuple) else (fact,))
    ]
    lines = text.split('\n') if isinstance(text, str) else text
    return any(all(fact in line for fact in required) for line in lines)


def numbers(text: str) -> list[int]:
    """The whole numbers in a text, in order."""
    return [int(number) for number in re.findall(r'\d+', text)]
