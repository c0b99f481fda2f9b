"""Classify image files with a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import add_model_flags, image_size, open_model
from vit_jax.commands._parser import Parser
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Prints the most probable classes of each image."""
    parser = Parser('predict', __doc__)
    add_model_flags(parser)
    parser.add_argument('--top', type=int, default=5, metavar='K', help='classes to print')
    parser.add_argument('--json', action='store_true', help='print JSON only')
    parser.add_argument('image', nargs='+', help='JPEG, PNG or WebP files')
    args = parser.parse_args(argv)
    if args.top < 1:
        raise UserError(f'--top {args.top}: must be at least 1')
    run = open_model(parser, args)
    from vit_jax.inference import images as image_files
    from vit_jax.runtime import sharding

    read = image_files.reader(run).read
    loaded = [read(path, image_size(args)) for path in args.image]
    sharding.use_compilation_cache()
    predict = classifier(run)
    results = [
        {
            'image': str(photo.path),
            'read_as': photo.note,
            'predictions': top_classes(predict(photo.batch), run.class_names, args.top),
        }
        for photo in loaded
    ]
    if args.json:
        print(json.dumps({'step': run.step, 'images': results}))
    else:
        print_tables(results)
    return 0


def classifier(run: Any) -> Any:
    """A compiled function from a batch of one image to its class probabilities [C].

    Raises:
      UserError: if the model has no head, or the run's task predicts no classes.
    """
    import jax
    import numpy as np

    if not run.config.model.get('num_classes', True):
        raise UserError(f'{run.workdir}: the model has no head, so that it predicts no classes')

    def probabilities(variables: Any, batch: Any) -> Any:
        def apply(*inputs: Any) -> Any:
            return run.model.apply(variables, *inputs, train=False)

        return run.task.predict(apply, batch).get('probs')

    compiled = jax.jit(probabilities)

    def predict(batch: Any) -> np.ndarray:
        probs = compiled(run.variables, batch) if hasattr(run.task, 'predict') else None
        if probs is None:
            raise UserError(f'task {run.config.task.name!r} predicts no classes of whole images')
        return np.asarray(probs, np.float64)[0]

    return predict


def top_classes(probs: Any, class_names: Sequence[str], k: int) -> list[dict[str, Any]]:
    """The `k` most probable classes, the most probable first.

    Args:
      probs: probabilities [C].
      class_names: C names; empty where the data has none.
      k: how many, at most C.
    """
    order = (-probs).argsort(kind='stable')[:k].tolist()
    return [
        {
            'label': i,
            'class': class_names[i] if i < len(class_names) else f'class {i}',
            'probability': float(probs[i]),
        }
        for i in order
    ]


def print_tables(results: Sequence[dict[str, Any]]) -> None:
    """One table an image."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for result in results:
        title = f'[b]{escape(result["image"])}[/b]  {result["read_as"]}'
        console.print(title, soft_wrap=True, highlight=False)
        table = Table(box=None, pad_edge=False)
        table.add_column('class', min_width=16)
        table.add_column('probability', justify='right')
        table.add_column(min_width=20)
        for row in result['predictions']:
            bar = '█' * round(20 * row['probability'])
            table.add_row(escape(row['class']), f'{row["probability"]:.4f}', f'[blue]{bar}[/blue]')
        console.print(table)
        console.print()
