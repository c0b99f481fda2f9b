"""Compile the published recipes for GPUs that are not here, and show what they need.

    make test-gpu-compile                             # prints rows for 8 H100s
    python tests/bench/gpu_recipes.py a100-40:8 detr  # prints rows that contain a word
    python tests/bench/gpu_recipes.py a100-80 detr    # writes rows of docs/gpu_recipes.md

Takes 10 to 60 seconds of CPU a step; nothing is trained. The recipes and their data are those of
`tpu_recipes.py`. A step that does not fit is divided into 2, 4, 8, ... microbatches until it does.
Recipes whose data are not here are left out. Exits with 1 if one does not compile.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from typing import Any

import pages
from tpu_recipes import OWN_PAIRS, RECIPES, NoData, config_of

from vit_jax.errors import UserError
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

TOPOLOGY = 'h100:8'
NUMBERS = (1, 8)  # of GPUs, in a row of the page
SCRIPT = 'tests/bench/gpu_recipes.py'
PAGE = pages.ROOT / 'docs' / 'gpu_recipes.md'
HEADINGS = ('recipe', 'batch', 'GiB', 'ms (MFU)', 'exchanges ms', 'GPU-hours')
PAGE_HEADINGS = (
    *('recipe', 'batch', '1 GPU: GiB', 'ms (MFU)', '8 GPUs: GiB', 'ms (MFU)'),
    *HEADINGS[-2:],
)


@dataclasses.dataclass(frozen=True)
class Found:
    """The step of a recipe on one topology.

    Attributes:
      report: of the largest batch.
      run: of the whole training.
      parts: the microbatches of a step.
      batch: the cell that describes it.
      length: whether the number of steps is known.
    """

    report: Any
    run: Any
    parts: int
    batch: str
    length: bool

    @property
    def memory(self) -> str:
        """GiB of a GPU."""
        gib = f'{self.report.needed / 2**30:,.1f}'
        parts = f' in {self.parts} parts' if self.parts > 1 else ''
        return gib + parts if self.report.fits else f'**no**, {gib}{parts}'

    @property
    def time(self) -> str:
        """Milliseconds and MFU."""
        if not self.report.fits:
            return ''
        return f'{1e3 * self.run.seconds:,.1f} ({self.run.mfu:.0%})'

    @property
    def others(self) -> list[str]:
        """Exchanges and GPU-hours."""
        if not self.report.fits:
            return ['', '']
        hours = f'{self.run.chip_hours:,.0f}' if self.length else ''
        return [f'{1e3 * self.report.link:.1f}', hours]


def find(recipe: str, name: str, parts: int = 1) -> Found:
    """The step with the fewest microbatches that fit without repeated operations.

    Args:
      recipe: of RECIPES.
      name: of a topology.
      parts: the number of microbatches to begin with, a power of two.
    """
    target = topology.parse_topology(name)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(recipe, folder)
        text = bool(config.data.get('buckets'))
        most = 1 if text else power_of_two(config.batch_size // target.chips)
        while True:
            divided = preflight.with_microbatches(config, parts) if parts > 1 else config
            reports, run = preflight.preflight(divided, target, ahead_of_time.PROGRAM)
            if parts >= most or all(r.fits and not r.rematerialized for r in reports):
                break
            parts = min(more_parts(reports[-1], parts), most)
    batch = f'{config.batch_size:,}' + (' tokens' if text else '')
    report = min(reports, key=lambda r: r.fits)
    return Found(report, run, parts, batch, recipe != OWN_PAIRS)


def power_of_two(number: int) -> int:
    """The largest that divides a number."""
    return number & -number


def more_parts(report: Any, parts: int) -> int:
    """The next number of microbatches to try: twice as many, or more if these cannot fit either."""
    held = report.memory.get(preflight.TEMPORARIES, 0)
    free = report.usable - (report.needed - held)
    factor = 2
    while held > factor * free > 0:
        factor *= 2
    return parts * factor


def print_rows(name: str, recipes: list[str]) -> list[str]:
    """Print a table for one topology; returns the recipes that do not compile."""
    print(line(HEADINGS), line(['---'] * len(HEADINGS)), sep='\n')
    failed = []
    for recipe in recipes:
        try:
            found = find(recipe, name)
        except NoData as e:
            print(f'{recipe} is left out: {e}', file=sys.stderr)
            continue
        except (UserError, RuntimeError) as e:
            failed.append(recipe)
            print(f'{recipe}: {e}', file=sys.stderr)
            continue
        print(
            line([f'`{recipe}`', found.batch, found.memory, found.time, *found.others]), flush=True
        )
    return failed


def write_rows(card: str, recipes: list[str]) -> list[str]:
    """Write rows of the page's table of a card; returns the recipes that do not compile."""
    failed = []
    for recipe in recipes:
        try:
            write_row(card, recipe, *(find(recipe, f'{card}:{number}') for number in NUMBERS))
        except (UserError, RuntimeError) as e:
            failed.append(recipe)
            print(f'{recipe}: its row stays as it is: {e}', file=sys.stderr)
    return failed


def write_row(card: str, recipe: str, one: Found, eight: Found) -> None:
    """Write a row of the page from the steps on one GPU and on eight."""
    table = PAGE, SCRIPT, card
    cells = [f'`{recipe}`', one.batch, one.memory, one.time]
    cells += [eight.memory, eight.time, *eight.others]
    rows = {row[0]: row for row in pages.read(*table)} | {cells[0]: cells}
    kept = [rows[f'`{name}`'] for name, _ in RECIPES if f'`{name}`' in rows]
    pages.write(*table, PAGE_HEADINGS, kept, packages=('jax', topology.PJRT))


def main(words: list[str]) -> None:
    cards = [word for word in words[:1] if word.partition(':')[0] in topology.GPUS]
    (name,) = cards or [TOPOLOGY]
    words = words[len(cards) :]
    topology.require_compiler(topology.parse_topology(name if ':' in name else f'{name}:1'))
    recipes = [r for r, _ in RECIPES if not words or any(word in r for word in words)]
    failed = (print_rows if ':' in name else write_rows)(name, recipes)
    if failed:
        sys.exit(f'{len(failed)} recipes do not compile: {", ".join(failed)}')


def line(cells: list[str] | tuple[str, ...]) -> str:
    return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f'error: {e}')
