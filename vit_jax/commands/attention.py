"""Draw where a trained model looks: in an image, or from a translation to its source."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.commands import _alignment
from vit_jax.commands._model import add_model_flags, image_size, open_model
from vit_jax.commands._parser import Parser
from vit_jax.errors import UserError

SIDE = 336  # pixels; smaller images are enlarged to be drawn


def main(argv: Sequence[str]) -> int:
    """Writes one picture."""
    parser = Parser('attention', __doc__)
    add_model_flags(parser)
    parser.add_argument('--out', required=True, help='the picture: .png, .pdf, .svg or .jpg')
    parser.add_argument('--layer', type=int, default=-1, help='whose heads to draw; -1 is the last')
    parser.add_argument(
        '--query',
        metavar='cls|ROW,COL',
        help='who looks in an image: the class token, which is the default (the mean over all '
        'patches without one), or one patch',
    )
    _alignment.add_flags(parser)
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='input',
        help='a JPEG, PNG or WebP file; or a sentence, and its translation if not the model is '
        'to translate it',
    )
    args = parser.parse_args(argv)
    parse_query(args.query)
    image_size(args)
    from vit_jax.runtime import sharding
    from vit_jax.viz import figures

    figures.check_format(args.out, '--out')
    run = open_model(parser, args)
    sharding.use_compilation_cache()
    of_text = hasattr(run.model, 'decode_step')
    check_inputs(parser, args, of_text)
    figure, line = _alignment.draw(run, args) if of_text else draw(run, args)
    try:
        path = figures.save(figure, args.out)
    except OSError as e:
        raise UserError(f'--out {args.out!r} cannot be written: {e.strerror}') from e
    print(f'{path}: {line}')
    return 0


def check_inputs(parser: Parser, args: argparse.Namespace, of_text: bool) -> None:
    """Raises UserError for flags or inputs that this kind of model has no use for."""
    if of_text and (args.query or args.image_size):
        parser.error('--query and --image-size are of images, and this run translates')
    if not of_text and (args.of_source or args.head is not None):
        parser.error('--head and --self are of runs that translate')
    if len(args.inputs) > (2 if of_text else 1):
        parser.error(f'unexpected {args.inputs[-1]!r}')


def draw(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """The picture of one image, and a line about it."""
    from vit_jax.inference import images as image_files
    from vit_jax.nn.patches import patch_grid
    from vit_jax.viz import attention

    if (stride := getattr(run.model, 'stride', None)) is None:
        raise UserError(f'model {run.config.model.name!r} has no attention to draw')
    photo = image_files.reader(run).read(args.inputs[0], image_size(args))
    outputs, weights = look(run, photo.batch)
    height, width = photo.image.shape[:2]
    grid = patch_grid(height, width, stride)
    figure = attention.draw(
        image_files.as_picture(photo.image, SIDE),
        weights,
        grid,
        layer=args.layer,
        query=parse_query(args.query),
        title=caption(photo.path.name, outputs, run.class_names),
    )
    depth, heads = weights.shape[:2]
    size = f'{grid[0]} x {grid[1]} patches'
    return figure, f'{depth} layers x {heads} heads, {size}; {photo.note}'


def parse_query(text: str | None) -> tuple[int, int] | None:
    """`cls` or no flag -> None, `2,3` -> (2, 3); raises UserError for anything else."""
    if text in (None, 'cls'):
        return None
    if not (match := re.fullmatch(r'(\d+),(\d+)', text)):
        raise UserError(f"--query {text!r}: write 'cls' or the patch as ROW,COL, for example 2,3")
    return int(match[1]), int(match[2])


def look(run: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    """The model's outputs for a batch of one image, and the attention weights [L, H, N, N]."""
    import jax

    from vit_jax.viz import attention

    @jax.jit
    def apply(variables: Any, batch: Any) -> Any:
        inputs = run.task.inputs(batch)
        return run.model.apply(variables, *inputs, train=False, mutable=['intermediates'])

    outputs, sown = apply(run.variables, batch)
    return outputs, attention.stack_weights(sown.get('intermediates', {}))[:, 0]


def caption(name: str, outputs: dict[str, Any], class_names: Sequence[str]) -> str:
    """The file's name, and what the model takes it for."""
    import numpy as np

    logits = np.asarray(outputs.get('logits', ()))
    if logits.ndim != 2 or len(class_names) != logits.shape[1]:
        return name
    return f'{name}: {class_names[int(logits[0].argmax())]}'
