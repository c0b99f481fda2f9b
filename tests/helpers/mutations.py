"""Files of which something is damaged, drawn from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD = (None, True, -1, 0, 0.5, 2**63, 10**30, 1e308, float('nan'), '', 'x', 'a\nb', '\0', [], [[]])
ODD += ({}, {'': {}}, [1, None], '../..', 'os.system', 'é' * 300)


def mutate_bytes(content: bytes, seed: int) -> bytes:
    """One to three bits flipped, slices overwritten, cut out, repeated, or the rest cut off."""
    rng, data = random.Random(seed), bytearray(content)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) or 1)
        end = min(len(data), start + rng.randint(1, 40))
        what = rng.randrange(5)
        if what == 0 and data:
            data[start] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[start:end] = rng.randbytes(end - start)
        elif what == 2:
            del data[start:end]
        elif what == 3:
            data[start:start] = data[start:end]
        elif rng.random() < 0.3:
            del data[start:]
    return bytes(data)


def mutate_json(text: str, seed: int) -> str:
    """One or two values replaced by odd ones, deleted, or put under another name."""
    rng, tree = random.Random(seed), json.loads(text)
    for _ in range(rng.randint(1, 2)):
        places = list(_places(tree))
        if not places:
            break
        parent, key = rng.choice(places)
        what = rng.randrange(4)
        if what == 0:
            del parent[key]
        elif what == 1 and isinstance(parent, dict):
            parent[rng.choice(('', 'x', 'name', 'step'))] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(tree)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of nested lists and dicts, as (parent, key)."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from _places(tree[key])
