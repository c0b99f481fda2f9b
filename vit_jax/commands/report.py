"""Write a page about one run or several, as a single HTML file to send to a colleague."""

from __future__ import annotations

from collections.abc import Sequence

from vit_jax.commands._parser import Parser, add_allow_flag, check_output, writing
from vit_jax.errors import UserError, visible


def main(argv: Sequence[str]) -> int:
    """Writes the page, and prints its name and size."""
    parser = Parser('report', __doc__)
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='run folders, or folders of them; they may be unfinished',
    )
    parser.add_argument(
        '--out',
        metavar='FILE',
        default='report.html',
        help='the page, with curves, evaluations, pictures, cost, configs and digests inside; it '
        'loads nothing (default: %(default)s)',
    )
    add_allow_flag(parser)
    args = parser.parse_args(argv)
    from vit_jax.storage import paths

    out = paths.path(args.out)
    if out.suffix.lower() not in ('.html', '.htm'):
        raise UserError(f'--out {args.out!r}: the name must end in .html')
    check_output(out, '--out')
    from vit_jax.commands import _run_page
    from vit_jax.scaling import page

    runs = _run_page.read(args.runs, args.allow)
    text = visible(page.one_file(*_run_page.blocks(runs)))
    with writing(args.out, '--out'):
        paths.write_text_atomic(out, text)
    print(f'{args.out}: {len(runs)} run{"s" * (len(runs) > 1)}, {len(text) / 1024:,.0f} KiB')
    return 0
