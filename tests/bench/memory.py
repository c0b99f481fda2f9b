"""Whether a run's memory grows: the resident memory of this process over 2,000 steps.

    python tests/bench/memory.py --steps 2000 --json memory.json

The digits at their smoke size, with a log line every 10 steps and an evaluation and a checkpoint
every 50, so that whatever a loop could keep is made often. Memory is taken after each evaluation,
when what is free has been given back to the system. A single value is off by several MiB, by what
other threads hold just then; what counts is the median of the last quarter less that of the second,
when everything has been compiled and every buffer has been made. Ends with code 1 if it is above
`--limit` MiB.

Measured: 507.0 - 507.7 MiB = -0.7 MiB over 2,000 steps, on 2 CPU cores with other work.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib
import sys
import tempfile

import numpy as np

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--limit', type=float, default=8.0, metavar='MIB')
    parser.add_argument('--json', metavar='PATH')
    args = parser.parse_args()
    steps, resident = measure(args.steps)
    quarters = [float(np.median(part)) for part in np.array_split(resident, 4)]
    growth = quarters[3] - quarters[1]
    print('medians of the quarters:', ', '.join(f'{mib:.1f}' for mib in quarters), 'MiB')
    print(f'growth from the second to the last: {growth:+.1f} MiB (limit {args.limit:g})')
    if args.json:
        found = {'steps': steps.tolist(), 'mib': resident.tolist(), 'growth_mib': growth}
        pathlib.Path(args.json).write_text(json.dumps(found) + '\n')
    return int(growth > args.limit)


def measure(total: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the MiB of resident memory after each."""
    from vit_jax.config import load
    from vit_jax.trainer import train

    config = load.load(
        f'{REPO}/experiments/vit/digits.py:smoke',
        [f'total={total}', 'every.log=10', 'every.eval=50', 'every.checkpoint=50'],
    )
    taken: list[tuple[int, float]] = []

    def report(step: int, results: dict[str, float]) -> bool:
        taken.append((step, resident_mib()))
        return False

    with tempfile.TemporaryDirectory() as folder:
        train.train(config, folder, report=report)
    steps, resident = np.array(taken).T
    return steps, resident


def resident_mib() -> float:
    """Memory of this process, without what only waits to be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


if __name__ == '__main__':
    sys.exit(main())
