"""Draw the attention of a trained model: in an image, or from a translation to its source."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._model import (
    add_model_flags,
    check_model_flags,
    image_size,
    open_model,
)
from vit_jax.commands._parser import Parser, check_picture, save_figure
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Write one picture."""
    parser = make_parser(argv)
    args = parser.parse_args(argv)
    check_model_flags(parser, args)
    parse_query(args.query)
    image_size(args)
    if args.parameters is not None:
        check_no_inputs(parser, args)
    elif not args.inputs:
        parser.error('the following arguments are required: input')
    from vit_jax.runtime import compile_cache

    check_picture(args.out, '--out', [*args.inputs, args.model])
    run = open_model(parser, args)
    compile_cache.enable()
    if args.parameters is not None:
        figure, line = draw_parameters(run, args)
    else:
        check_inputs(parser, args, of_text=not run.raw_images)
        figure, line = draw_image(run, args) if run.raw_images else draw_text(run, args)
    print(f'{save_figure(figure, args.out, "--out")}: {line}')
    return 0


def make_parser(argv: Sequence[str]) -> Parser:
    """Make the parser of the flags."""
    parser = Parser('attention', __doc__)
    add_model_flags(parser, argv)
    parser.add_argument('--out', required=True, help='picture to write: PNG, SVG, PDF or JPEG')
    parser.add_argument(
        '--map',
        metavar='NAME',
        help='stack of layers: a regular expression for the start of its name, such as '
        "'encoder' or 'decoder/.*cross' (default: the last stack)",
    )
    parser.add_argument(
        '--layer', type=int, default=-1, help='layer of the stack (default: the last)'
    )
    parser.add_argument('--head', type=int, help='head of the layer (default: the mean of all)')
    parser.add_argument(
        '--query',
        metavar='cls|ROW,COL|N',
        help='query in an image: the class token, one patch, or one query of a decoder '
        '(default: cls, or the mean over all patches)',
    )
    parser.add_argument(
        '--self',
        action='store_true',
        dest='of_source',
        help="draw the encoder's self-attention over the source text, same as --map encoder",
    )
    parser.add_argument(
        '--parameters',
        metavar='NAME',
        help='parameters to draw instead of an input (position embeddings, relative position '
        "biases, filters): a regular expression for the start of their names, such as 'stage_0', "
        "or '' for all",
    )
    parser.add_argument(
        'inputs',
        nargs='*',
        metavar='input',
        help='JPEG, PNG or WebP file; or a sentence, and optionally its translation',
    )
    return parser


def check_no_inputs(parser: Parser, args: argparse.Namespace) -> None:
    """Raise UserError for flags or inputs that a picture of parameters does not use."""
    if args.inputs:
        parser.error(f'--parameters does not take an input: leave out {args.inputs[0]!r}')
    if args.map or args.query or args.of_source or args.layer != -1:
        parser.error('--map, --layer, --query and --self need an input: leave out --parameters')


def check_inputs(parser: Parser, args: argparse.Namespace, of_text: bool) -> None:
    """Raise UserError for flags or inputs that do not apply to images, or to text."""
    if of_text and (args.query or args.image_size):
        parser.error('--query and --image-size apply to images, but this run translates')
    if not of_text and args.of_source:
        parser.error('--self applies to runs that translate')
    if args.of_source and args.map:
        parser.error('give one of --self and --map')
    if len(args.inputs) > (2 if of_text else 1):
        inputs = 'a sentence and its translation' if of_text else 'one image'
        parser.error(f'unexpected {args.inputs[-1]!r}: give {inputs}')


def parse_query(text: str | None) -> tuple[int, ...] | None:
    """Parse `--query`: 'cls' -> (), '2,3' -> (2, 3), '7' -> (7,); else raise UserError."""
    if text in (None, 'cls'):
        return None if text is None else ()
    if not re.fullmatch(r'\d+(,\d+)?', text):
        raise UserError(
            f"--query {text!r}: write 'cls', a patch as ROW,COL such as 2,3, or the number of a "
            'query'
        )
    return tuple(map(int, text.split(',')))


def select_maps(args: argparse.Namespace) -> Any:
    """Select the maps that the flags choose."""
    from vit_jax.viz.attention_pictures import MapSelection

    stack = 'encoder' if args.of_source else args.map or ''
    return MapSelection(stack, args.layer, args.head, parse_query(args.query))


def draw_image(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """Draw the attention in one image; return the figure and a line about it."""
    from vit_jax.inference.images import photo_reader
    from vit_jax.inference.predict import batch_of_one, predict_with_attention
    from vit_jax.viz import attention_pictures, predictions
    from vit_jax.viz.photo import Context

    photo = photo_reader(run).read(args.inputs[0], image_size(args))
    outputs, maps = predict_with_attention(run, batch_of_one(photo.fields))
    viz = predictions.find_viz(run.settings.task.name)
    context = Context(run.class_names, vocab=run.vocab)
    return attention_pictures.draw_on_photo(photo, outputs, maps, viz, context, select_maps(args))


def draw_parameters(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """Draw the chosen parameters; return the figure and a line about them."""
    from vit_jax.inference.predict import parameter_pictures
    from vit_jax.viz import attention_pictures

    pictures = parameter_pictures(run, args.parameters)
    title = f'{run.settings.model.name}, {run.path.name}'
    figure = attention_pictures.draw_parameters(pictures, index=args.head, title=title)
    more = f' and {len(pictures) - 1} more' if len(pictures) > 1 else ''
    return figure, f'{pictures[0].name}{more}'


def draw_text(run: Any, args: argparse.Namespace) -> tuple[Any, str]:
    """Draw the attention between two sentences, or within one; return the figure and a line.

    Raises:
      UserError: The run does not translate text, or a sentence is empty or too long.
    """
    from vit_jax.inference.predict import batch_of_one, predict_with_attention
    from vit_jax.inference.text import default_translation, sentence_reader
    from vit_jax.viz import attention_pictures

    reader = sentence_reader(run)
    source = reader.read_whole(args.inputs[0], 'source')
    if len(args.inputs) > 1:
        target = reader.read_whole(args.inputs[1], 'target')
    else:
        target = default_translation(run, reader, source)
    _, maps = predict_with_attention(run, batch_of_one({'source': source, 'target': target}))
    return attention_pictures.draw_between_sentences(
        source, target, maps, reader.vocab, run.settings.model.name, select_maps(args)
    )
