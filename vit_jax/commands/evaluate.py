"""Evaluate a run exactly: every example of the split counts once."""

from __future__ import annotations

import json
from collections.abc import Sequence

from vit_jax.commands._parser import Parser
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Prints {name/metric: value} of a run folder, for its own evaluations or another split."""
    parser = Parser('evaluate', __doc__)
    parser.add_argument('--workdir', required=True, help='the run folder')
    parser.add_argument('--step', type=int, help='a kept checkpoint; the newest by default')
    parser.add_argument('--source', help="other data, as 'tfds:NAME' or 'folder:PATH'")
    parser.add_argument('--split', help='another split of it')
    parser.add_argument('--batch-size', type=int)
    parser.add_argument('--json', action='store_true', help='print JSON only')
    args = parser.parse_args(argv)
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f'--batch-size {args.batch_size}: must be at least 1')
    from vit_jax import evaluate, runs, sharding

    sharding.use_compilation_cache()
    run = runs.load_run(args.workdir, args.step)
    given = {'source': args.source, 'split': args.split, 'batch_size': args.batch_size}
    with run.config.unlocked():
        for section in run.config.evals.values():
            section.update({k: v for k, v in given.items() if v is not None})
    layout = sharding.make_layout()
    steps = evaluate.compile_steps(run.model, run.task, layout)
    variables = layout.create(lambda: run.variables)
    results = {
        f'{name}/{k}': v
        for name, evaluation in evaluate.open_evals(run.config, layout, steps).items()
        for k, v in evaluation(variables).items()
    }
    if args.json:
        print(json.dumps({'step': run.step, **results}))
    else:
        print(f'step {run.step}  ' + '  '.join(f'{k} {v:.4f}' for k, v in results.items()))
    return 0
