"""Draw where a trained model looks in an image: every layer, every head, rollout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

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
        default='cls',
        metavar='cls|ROW,COL',
        help='who looks: the class token (the mean over all patches without one), or one patch',
    )
    parser.add_argument('image', help='a JPEG, PNG or WebP file')
    args = parser.parse_args(argv)
    query = parse_query(args.query)
    size = image_size(args)
    from vit_jax.viz import attention, figures

    figures.check_format(args.out, '--out')
    run = open_model(parser, args)
    from vit_jax import photos, sharding
    from vit_jax.nn.patches import patch_grid

    if (stride := getattr(run.model, 'stride', None)) is None:
        raise UserError(f'model {run.config.model.name!r} has no attention to draw')
    photo = photos.reader(run).read(args.image, size)
    sharding.use_compilation_cache()
    outputs, weights = look(run, photo.batch)
    height, width = photo.image.shape[:2]
    grid = patch_grid(height, width, stride)
    figure = attention.draw(
        photos.as_picture(photo.image, SIDE),
        weights,
        grid,
        layer=args.layer,
        query=query,
        title=caption(photo.path.name, outputs, run.class_names),
    )
    try:
        path = figures.save(figure, args.out)
    except OSError as e:
        raise UserError(f'--out {args.out!r} cannot be written: {e.strerror}') from e
    depth, heads = weights.shape[:2]
    print(f'{path}: {depth} layers x {heads} heads, {grid[0]} x {grid[1]} patches; {photo.note}')
    return 0


def parse_query(text: str) -> tuple[int, int] | None:
    """`cls` -> None, `2,3` -> (2, 3); raises UserError for anything else."""
    if text == 'cls':
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
