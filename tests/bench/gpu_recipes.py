"""Compile the published recipes for GPUs that are not here, and print a table of what they need.

    make test-gpu-compile
    python tests/bench/gpu_recipes.py a100-40:8 detr vit_compute   # rows that contain a word

Takes half a minute or more of CPU a recipe; nothing is trained. The recipes and their data are
those of `tpu_recipes.py`. Exits with 1 if a recipe does not compile; one that does not fit into the
memory is a row that says so.
"""

from __future__ import annotations

import sys

from tpu_recipes import HEADINGS, RECIPES, row

from vit_jax.errors import UserError
from vit_jax.profiling import topology

TOPOLOGY = 'h100:8'


def main(words: list[str]) -> None:
    name, names = (words[0], words[1:]) if words and ':' in words[0] else (TOPOLOGY, words)
    topology.require_compiler(topology.parse(name))
    print(line(HEADINGS), line(['---'] * len(HEADINGS)), sep='\n')
    failed = []
    for recipe, _ in RECIPES:
        if names and not any(word in recipe for word in names):
            continue
        try:
            print(line(row(recipe, name)), flush=True)
        except (UserError, RuntimeError) as e:
            failed.append(recipe)
            print(f'{recipe}: {e}', file=sys.stderr)
    if failed:
        sys.exit(f'{len(failed)} recipes do not compile: {", ".join(failed)}')


def line(cells: list[str] | tuple[str, ...]) -> str:
    return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f'error: {e}')
