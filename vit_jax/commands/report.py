"""Write a report on runs as a single HTML file to send to a colleague."""

from __future__ import annotations

from collections.abc import Sequence

from vit_jax.commands._parser import RUNS_HELP, Parser, add_allow_flag, check_output, writing
from vit_jax.errors import UserError, visible


def main(argv: Sequence[str]) -> int:
    """Write the page, and print its name and size.

    Raises:
      UserError: The name of the page does not end in .html.
    """
    from vit_jax.storage import paths

    parser = Parser('report', __doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help=RUNS_HELP,
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        default='report.html',
        help='self-contained page to write, with curves, evaluations, pictures, cost, configs and '
        'digests (default: %(default)s)',
    )
    add_allow_flag(parser)
    args = parser.parse_args(argv)
    out = paths.path(args.out)
    if out.suffix.lower() not in ('.html', '.htm'):
        raise UserError(f'--out {args.out!r}: the name must end in .html')
    check_output(out, '--out')
    from vit_jax.commands import _report_page  # here, since it imports JAX
    from vit_jax.scaling.pages import html_page

    entries = _report_page.read(args.runs, args.allow)
    text = visible(html_page(*_report_page.blocks(entries)))
    with writing(args.out, '--out'):
        paths.write_text_atomic(out, text)
    count = f'{len(entries)} run{"s" * (len(entries) > 1)}'
    print(f'{args.out}: {count}, {len(text) / 1024:,.0f} KiB')
    return 0
