"""`scaling coordinates`: the coordinate check of a parametrization, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from vit_jax.commands._parser import Parser, align
from vit_jax.commands._pictures import check_picture, save_figure
from vit_jax.errors import UserError, positive


def coordinates(argv: Sequence[str]) -> int:
    """Check that a few steps change wide models as they change narrow ones (muP)."""
    from vit_jax.config.load import parse_config_args

    parser = Parser('scaling coordinates', coordinates.__doc__)
    add = parser.add_argument
    add('--multiples', default='1,2,4,8', metavar='N,N', help='of the widths of the base model')
    add(
        '--steps',
        type=positive,
        default=5,
        metavar='N',
        help='at a constant rate (default: 5)',
    )
    add(
        '--seeds',
        type=positive,
        default=1,
        metavar='N',
        help='to average over (default: 1)',
    )
    add('--output', metavar='FILE', default='coordinates.png', help='PNG, SVG or PDF')
    args, config = parse_config_args(parser, argv)
    multiples = _multiples(args.multiples)
    if config is None:
        raise UserError('scaling coordinates needs --config FILE[:ARG]')
    from vit_jax.runtime.console import progress
    from vit_jax.trainer import coordinates as lib
    from vit_jax.viz import coordinates as viz

    check_picture(args.output, '--output')
    with progress('trainings', 2 * len(multiples) * args.seeds) as advance:
        changes = lib.check(config, multiples, args.steps, args.seeds, advance)
    print(f'RMS of the change of each layer by {args.steps} steps')
    print(align(_table(changes, multiples), left=2))
    print(save_figure(viz.draw(changes, args.steps), args.output, '--output'))
    return 0


def _multiples(text: str) -> list[int]:
    words = [word.strip() for word in text.split(',')]
    if not all(word.isdecimal() and int(word) for word in words) or len(set(words)) < 2:
        raise UserError(f'--multiples {text!r}: name two or more whole numbers, as 1,2,4,8')
    return sorted({int(word) for word in words})


def _table(changes: Sequence, multiples: Sequence[int]) -> list[list[str]]:
    """A line for each layer of each parametrization; growth is from the first width to the last."""
    lines = [['parametrization', 'layer', *(f'{times}x' for times in multiples), 'growth']]
    for name, layer in dict.fromkeys((c.parametrization, c.layer) for c in changes):
        rms = [c.rms for c in changes if (c.parametrization, c.layer) == (name, layer)]
        lines.append([name, layer, *(f'{x:.3g}' for x in rms), f'{rms[-1] / rms[0]:.2f}'])
    return lines
