"""Draw where a trained model looks: in an image, from a translation to its source, or always."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import add_model_flags, image_size, open_model
from vit_jax.commands._parser import Parser
from vit_jax.commands._pictures import save_figure
from vit_jax.errors import UserError

SIDE = 448  # pixels of the shorter side of a picture, at least


def main(argv: Sequence[str]) -> int:
    """Writes one picture."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parse_query(args.query)
    image_size(args)
    if args.parameters is not None:
        check_no_inputs(parser, args)
    elif not args.inputs:
        parser.error('the following arguments are required: input')
    from vit_jax.runtime import sharding
    from vit_jax.viz import figures

    figures.check_format(args.out, '--out')
    run = open_model(parser, args)
    sharding.use_compilation_cache()
    if args.parameters is not None:
        figure, line = draw_parameters(run, args)
    else:
        check_inputs(parser, args, of_text=not run.image)
        figure, line = draw_image(run, args) if run.image else draw_text(run, args)
    print(f'{save_figure(figure, args.out, "--out")}: {line}')
    return 0


def make_parser() -> Parser:
    """The flags."""
    parser = Parser('attention', __doc__)
    add_model_flags(parser)
    parser.add_argument('--out', required=True, help='the picture: .png, .pdf, .svg or .jpg')
    parser.add_argument(
        '--map',
        metavar='NAME',
        help='a stack of layers, or a regular expression that the names of its maps begin with, as '
        "'encoder' or 'decoder/.*cross'; the last stack by default",
    )
    parser.add_argument('--layer', type=int, default=-1, help='of the stack; -1 is the last')
    parser.add_argument(
        '--head', type=int, help='one head of the layer, where not all are drawn; else their mean'
    )
    parser.add_argument(
        '--query',
        metavar='cls|ROW,COL|N',
        help='who looks in an image: the class token, which is the default (the mean over all '
        'patches without one), one patch, or one query of a decoder',
    )
    parser.add_argument(
        '--self',
        action='store_true',
        dest='of_source',
        help="of text: the encoder's attention of the source to itself, as --map encoder",
    )
    parser.add_argument(
        '--parameters',
        metavar='NAME',
        help='without an input: what the model has learned of positions (how alike they are, or '
        'the bias of each head for relative ones) and its filters; a regular expression that the '
        "parameters' names begin with, as 'stage_0', or '' for all",
    )
    parser.add_argument(
        'inputs',
        nargs='*',
        metavar='input',
        help='a JPEG, PNG or WebP file; or a sentence, and its translation if not the model is '
        'to translate it',
    )
    return parser


def check_no_inputs(parser: Parser, args: argparse.Namespace) -> None:
    """Raises UserError for flags or inputs that a picture of parameters has no use for."""
    if args.inputs:
        parser.error(f'--parameters takes no input, and here is {args.inputs[0]!r}')
    if args.map or args.query or args.of_source or args.layer != -1:
        parser.error('--map, --layer, --query and --self are of an input, not of --parameters')


def check_inputs(parser: Parser, args: argparse.Namespace, of_text: bool) -> None:
    """Raises UserError for flags or inputs that a run on such data has no use for."""
    if of_text and (args.query or args.image_size):
        parser.error('--query and --image-size are of images, and this run translates')
    if not of_text and args.of_source:
        parser.error('--self is of runs that translate')
    if args.of_source and args.map:
        parser.error('give one of --self and --map')
    if len(args.inputs) > (2 if of_text else 1):
        what = 'a sentence and its translation' if of_text else 'one image'
        parser.error(f'unexpected {args.inputs[-1]!r}: a picture is of {what}')


def parse_query(text: str | None) -> tuple[int, ...] | None:
    """`cls` or no flag -> None, `2,3` -> (2, 3), `7` -> (7,); raises UserError for another."""
    if text in (None, 'cls'):
        return None
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise UserError(
            f"--query {text!r}: write 'cls', the patch as ROW,COL, for example 2,3, or the number "
            'of a query'
        )
    return tuple(map(int, text.split(',')))


def draw_image(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """The picture of what is looked at in one image, and a line about it."""
    from vit_jax.inference import attention as maps_of
    from vit_jax.inference.images import photo_reader
    from vit_jax.inference.predict import batch_of_one
    from vit_jax.viz import attention, predictions

    photo = photo_reader(run).read(args.inputs[0], image_size(args))
    outputs, maps = maps_of.look(run, batch_of_one(photo.fields))
    stack = maps_of.choose_stack(maps, args.map or '')
    weights, last = maps_of.stacked(stack), stack[-1]
    if len(last.key_grid) != 2:
        raise UserError(f'{last.name} does not look at the image: choose another with --map')
    picture, query = photo.view(SIDE), parse_query(args.query)
    seen = getattr(predictions.find(run.config.task.name), 'seen', None)
    picture = picture if seen is None else seen(picture)
    factor = picture.shape[0] // photo.image.shape[0]
    options: dict[str, Any] = {
        'layer': args.layer,
        'title': f'{caption(photo.path.name, outputs, run.class_names)} ({photo.note})',
        'seen': tuple(factor * side for side in photo.seen),
    }
    if len(last.query_grid) == 1 and args.query is None:
        names = query_names(run, outputs)
        figure = attention.draw_queries(
            picture, weights, last.key_grid, head=args.head, names=names, **options
        )
    elif args.head is not None:
        raise UserError(f'--head {args.head}: the heads of the layer are all drawn')
    else:
        figure = attention.draw_layers(
            picture,
            weights,
            last.query_grid,
            last.key_grid,
            query=query,
            to_itself=last.to_itself,
            **options,
        )
    depth, heads = weights.shape[:2]
    size = ' x '.join(map(str, last.key_grid))
    return figure, f'{depth} layers x {heads} heads, {size} patches; {photo.note}'


def draw_parameters(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """The picture of parameters that say where the model always looks, and a line about them."""
    from vit_jax.inference import attention as maps_of
    from vit_jax.viz import parameters

    chosen = maps_of.parameter_pictures(run, args.parameters)
    title = f'{run.config.model.name}, {run.workdir.name}'
    figure = parameters.draw(chosen, only=args.head, title=title)
    more = f' and {len(chosen) - 1} more' if len(chosen) > 1 else ''
    return figure, f'{chosen[0].name}{more}'


def query_names(run: Any, outputs: dict[str, Any]) -> dict[int, str] | None:
    """The queries worth drawing, with names, if what shows the task's predictions tells them."""
    from vit_jax.viz import predictions

    queries = getattr(predictions.find(run.config.task.name), 'queries', None)
    return queries and queries(outputs, run.class_names)


def caption(name: str, outputs: dict[str, Any], class_names: Sequence[str]) -> str:
    """The file's name, and what the model takes it for."""
    import numpy as np

    logits = np.asarray(outputs.get('logits', ()))
    if logits.ndim != 2 or len(class_names) != logits.shape[1]:
        return name
    return f'{name}: {class_names[int(logits[0].argmax())]}'


def draw_text(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """The map between the words of two sentences, or of one to itself, and a line about it.

    Raises:
      UserError: if the run does not translate text, or the sentences do not fit it.
    """
    from vit_jax.inference import attention as maps_of
    from vit_jax.inference.predict import batch_of_one
    from vit_jax.inference.text import own_translation, sentence_reader
    from vit_jax.viz import alignment, attention

    reader = sentence_reader(run)
    source = reader.read_whole(args.inputs[0], 'source')
    if len(args.inputs) > 1:
        target = reader.read_whole(args.inputs[1], 'target')
    else:
        target = own_translation(run, reader, source)
    _, maps = maps_of.look(run, batch_of_one({'source': source, 'target': target}))
    stack = maps_of.choose_stack(maps, 'encoder' if args.of_source else args.map or '')
    weights = maps_of.stacked(stack)
    chosen, words = attention.of_layer(weights, args.layer, args.head)
    (who, rows), (whom, columns) = maps_of.sentence_axes(stack[-1], source, target)
    kind = 'self-attention' if whom.startswith(who) else 'attention'
    figure = alignment.draw(
        chosen,
        reader.vocab.pieces(rows),
        reader.vocab.pieces(columns),
        names=(who, whom),
        title=f'{run.config.model.name}: {kind}, {words}',
    )
    depth, heads = weights.shape[:2]
    line = f'{depth} layers x {heads} heads, {len(rows)} x {len(columns)} tokens'
    return figure, line if who == 'source' else f'{line}; {reader.vocab.decode(target)}'
