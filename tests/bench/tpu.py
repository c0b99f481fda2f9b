"""Compile training steps of blocks and of ViT-B/16 for TPUs; write tables of docs/kernels.md.

    python tests/bench/tpu.py                        # every row, by its schedule
    python tests/bench/tpu.py 'vit pallas' accum     # those whose names contain one of the words
    python tests/bench/tpu.py --cycles 'vit pallas'  # and with machine code, which takes minutes

Nothing runs on a TPU, and none is needed. A row that is compiled without `--cycles` keeps its
cycles where its schedule is the one that they belong to.
"""

from __future__ import annotations

import compiler
import pages
import tpu_block
from tpu_block import FLAX, Step

from vit_jax.config import load
from vit_jax.profiling import preflight, topology
from vit_jax.rehearsal import ahead_of_time

PAGE = pages.ROOT / 'docs' / 'kernels.md'
SCRIPT = 'tests/bench/tpu.py'
CYCLES = '--cycles'

BLOCKS = (
    *(Step('vit', by, 128) for by in (FLAX, 'xla', 'pallas')),
    Step('vit', 'pallas', 128, residual='float32'),
    *(Step('vit', by, 128, rate=0.1) for by in ('xla', 'pallas')),
    *(Step('vit', by, 32) for by in (FLAX, 'xla', 'pallas')),
    *(Step('vit', by, 128, 'v6e') for by in (FLAX, 'xla', 'pallas')),
    *(Step(name, by, 128) for name in ('encoder', 'decoder') for by in ('xla', 'pallas')),
    *(Step('detr', by, 4) for by in ('xla', 'pallas')),
    *(Step('detr', by, 4, rate=0.1) for by in ('xla', 'pallas')),
    *(Step('detr-1344', by, 4, rate=0.1) for by in ('xla', 'pallas')),
    *(Step('vit-512', by, 16) for by in ('xla', 'pallas')),
    *(Step('vit-896', by, 4) for by in ('xla', 'pallas')),
    *(
        Step(f'axial-{lines}', by, 16)
        for lines in ('row', 'column', 'causal')
        for by in ('xla', 'pallas')
    ),
    *(Step('color', by, 128) for by in ('xla', 'pallas')),
    *(Step('object', by, 4) for by in ('xla', 'pallas')),
    *(Step('object-1344', by, 4) for by in ('xla', 'pallas')),
    Step('map', 'xla', 128),
)
BLOCK_HEADINGS = (
    *('block', 'ms at least', 'GB moved', 'GB of temporaries'),
    *('Mcycles estimated', 'Mcycles of kernels'),
)

# Of `experiments/vit/imagenet2012.py:B/16,300ep,fast`, 512 images on four chips.
CONFIG, SLICE, BATCH = 'experiments/vit/imagenet2012.py:B/16,300ep,fast', 'v5e:2x2', 512
STEPS = (
    *('', 'batch_size=256', 'batch_size=128'),
    *(f'step.accum_steps={n}' for n in (2, 4, 8)),
    *(f'model.remat={kept}' for kept in ('dots', 'names', 'nothing')),
    'model.scan=True',
    *(f'model.scan=True model.remat={kept}' for kept in ('dots', 'names', 'nothing')),
    *('model.attention=xla', 'model.attention=xla step.accum_steps=4'),
)
STEP_HEADINGS = (
    *('`--config.`', 'GiB per chip', 'GiB of temporaries', 'ms at least', 'MFU at most'),
    *('GB moved', 'Mcycles estimated'),
)


def name_of(step: Step) -> str:
    """Of its row."""
    rest = [f'{step.batch} on {step.chip}']
    rest += ['residual stream in float32'] if step.residual == 'float32' else []
    rest += [f'dropping {step.rate:.0%}'] if step.rate else []
    return f'`{step.block} {step.attention}`, {", ".join(rest)}'


def block_row(step: Step, cycles: bool) -> list[str]:
    cost = tpu_block.cost(step, cycles)
    sizes = [f'{size / 1e9:.2f}' for size in (cost.moved, cost.temporaries)]
    counts = [f'{n / 1e6:.2f}' if n else '' for n in (cost.cycles, cost.kernel_cycles)]
    return [name_of(step), f'{1e3 * cost.seconds:.2f}', *sizes, *counts]


def step_name(overrides: str) -> str:
    return ', '.join(f'`{override}`' for override in overrides.split()) or 'as it is'


def step_row(overrides: str, cycles: bool) -> list[str]:
    given = [f'batch_size={BATCH}', *overrides.split()]
    config = load.override(load.load(CONFIG), given)
    (report, *_), _ = preflight.preflight(
        config, topology.parse_topology(SLICE), ahead_of_time.PROGRAM, cycles=cycles
    )
    if not report.fits:
        sizes = f'{report.needed / 2**30:.1f} of {report.usable / 2**30:.1f}: does not fit'
        return [step_name(overrides), sizes, '', '', '', '', '']
    sizes = [report.needed, report.memory[preflight.TEMPORARIES]]
    estimate = report.estimate and report.estimate * topology.parse_topology(SLICE).chip.clock
    return [
        step_name(overrides),
        *(f'{size / 2**30:.1f}' for size in sizes),
        f'{1e3 * report.bound:.1f}',
        f'{report.mfu(report.bound):.0%}',
        f'{report.bytes / 1e9:.1f}',
        f'{estimate / 1e6:.0f}' if estimate else '',
    ]


def with_cycles_kept(row: list[str], old: list[str] | None, last: int) -> list[str]:
    """The row, with its `last` cells from the old one where all others are as they were."""
    return old if old and not any(row[-last:]) and row[:-last] == old[:-last] else row


def main(*words: str) -> None:
    cycles, chosen = CYCLES in words, [word for word in words if word != CYCLES]
    tables = (
        ('blocks', BLOCK_HEADINGS, 2, {name_of(step): (block_row, step) for step in BLOCKS}),
        ('steps', STEP_HEADINGS, 1, {step_name(key): (step_row, key) for key in STEPS}),
    )
    for table, headings, last, rows in tables:
        for name, (make, what) in rows.items():
            if chosen and not any(word in name.replace('`', '') for word in chosen):
                continue
            new = make(what, cycles)
            made = {cells[0]: cells for cells in pages.read(PAGE, SCRIPT, table)}
            made[name] = with_cycles_kept(new, made.get(name), last)
            print(' | '.join(made[name]), flush=True)
            kept = [made[key] for key in rows if key in made]
            pages.write(PAGE, SCRIPT, table, headings, kept)


if __name__ == '__main__':
    compiler.run(main, tpu_block.lower)
