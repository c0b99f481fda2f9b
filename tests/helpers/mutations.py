"""Files of which something is damaged, drawn from a seed."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

ODD = (None, True, -1, 0, 0.5, 2**63, 10**30, 1e308, float('nan'), '', 'x', 'a\nb', '\0', [], [[]])
ODD += ({}, {'': {}}, [1, None], '../..', 'os.system', 'é' * 300)
# Beyond what a float, Python's stack and int64 hold; `deep:N` becomes N nested lists.
ODD += (10**400, -(10**400), float('inf'), float('-inf'), 'deep:100', 'deep:3000', 'deep:200000')
KEYS = ('', 'x', 'name', 'step')
# Of configs beside checkpoints, whose numbers are sizes.
SIZES = (
    *ODD,
    2,
    3,
    -16,
    10**6,
    10**9,
    5e7,
    1e-30,
    [0, 0],
    [-4, -4],
    [10**6, 10**6],
    '\x1b[2J',
    '224',
)
NUMBERS = (*KEYS, '-1', '50000000', '1000000000000', '9' * 5000, '\x1b[2J')


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


def mutate_json(
    text: str, seed: int, odd: tuple[Any, ...] = ODD, keys: tuple[str, ...] = KEYS
) -> str:
    """One or two values replaced by odd ones, deleted, or put under another of `keys`."""
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
            parent[rng.choice(keys)] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(odd))
    nested = re.compile('"deep:([0-9]+)"')
    return nested.sub(lambda n: '[' * int(n[1]) + ']' * int(n[1]), json.dumps(tree))


def mutate_arrays(flat: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """One or two arrays lost, renamed, numbered anew, of another shape or type, or out of range."""
    rng, arrays = random.Random(seed), dict(flat)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(arrays))
        array = arrays.pop(name)
        for new, changed in rng.choice(_CHANGES)(rng, name, array).items():
            arrays[new] = np.ascontiguousarray(changed)
    return arrays


def _renamed(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    odd = rng.choice(('', name + '.x', name * 2, name + '\x1b[2J\n', '../' + name, name.upper()))
    return {odd: array}


def _numbered(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Its own numbers and another: of blocks, stages, layers."""
    other = rng.choice(('7', '1000000000', '9' * 5000, '-1', '01'))
    return {name: array, re.sub(r'\d+', other, name, count=1): array}


def _reshaped(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    forms = (array.T, array[None], array.reshape(-1), array[..., :1], array[:0])
    return {name: rng.choice((*forms, array.reshape(-1)[:1], np.zeros((0, 10**9), array.dtype)))}


def _deep(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """A long axis of a small array, as of blocks or positions."""
    return {name: np.zeros((rng.choice((10**4, 10**6)), *[1] * (array.ndim - 1)), np.int8)}


def _revalued(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    changed = np.array(array)
    changed.reshape(-1)[:1] = rng.choice((np.nan, np.inf, -1.0, 3e38, 0.0))
    return {name: changed}


def _retyped(rng: random.Random, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(over='ignore', invalid='ignore'):
        return {name: array.astype(rng.choice(('float16', 'float64', 'int8', 'bool', 'uint64')))}


_CHANGES = (
    lambda rng, name, array: {},
    *(_renamed, _numbered, _reshaped, _deep, _revalued, _retyped),
)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of nested lists and dicts, as (parent, key)."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from _places(tree[key])
