"""`scaling coverage`: how often the bands of `scaling fit` contain a known law."""

from __future__ import annotations

import json
from collections.abc import Sequence

from vit_jax.commands._parser import Parser


def coverage(argv: Sequence[str]) -> int:
    """Measure the bands of a fit on laws that are drawn, with noise that is known."""
    parser = Parser('scaling coverage', coverage.__doc__)
    from vit_jax.scaling import coverage as lib

    default = lib.Setting()
    shown = ' (default: %(default)s)'
    add = parser.add_argument
    add('--form', default=default.form, help=f'{", ".join(lib.FORMS)}{shown}')
    add('--points', type=int, default=default.points, metavar='N', help=f'of a curve{shown}')
    add('--noise', type=float, default=default.noise, help=f'deviation of log y{shown}')
    add('--curves', type=int, default=default.curves, metavar='N', help=f'laws drawn{shown}')
    add('--bootstrap', type=int, default=default.bootstrap, metavar='N', help=f'replicates{shown}')
    add('--seed', type=int, default=0)
    add('--json', action='store_true', help='print JSON only')
    args = parser.parse_args(argv)
    setting = lib.Setting(args.form, args.points, args.noise, args.curves, args.bootstrap)
    found = lib.measure(setting, args.seed)
    if args.json:
        print(json.dumps(found))
        return 0
    drawn = (
        f'{args.curves} laws of the form {args.form}, {args.points} points, noise {args.noise:g}'
    )
    if args.form == 'auto':
        drawn = f'{args.curves} laws of each kind, {args.points} points each'
    print(f'{drawn}: shares of truths in the 90 % bands')
    width = max(map(len, found)) + 2
    for name, share in found.items():
        print(f'{name:<{width}}{share:.2f}')
    return 0
