"""Upload a model to the Hugging Face Hub, with a model card that has its measured metrics."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Sequence

from vit_jax.commands._model import MODEL, add_checkpoint_flags, run_options
from vit_jax.commands._parser import Parser, check_output
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Write the files, upload them, and print the address of the commit.

    Raises:
      UserError: The name is not ORG/NAME, the model cannot be read or written, or the Hub rejects
        the login.
    """
    parser = Parser('push', __doc__)
    parser.add_argument('model', metavar='MODEL', help=MODEL)
    parser.add_argument(
        'repository',
        metavar='ORG/NAME',
        help='repository, created if missing; files of the same names are replaced there',
    )
    parser.add_argument(
        '--dry-run', metavar='FOLDER', help='new folder for the files, which are not uploaded'
    )
    parser.add_argument('--private', action='store_true', help='make a new repository private')
    add_checkpoint_flags(parser)
    args = parser.parse_args(argv)
    if args.dry_run is not None:
        check_output(pathlib.Path(args.dry_run) / 'README.md', '--dry-run')
        if pathlib.Path(args.dry_run).exists():
            raise UserError(f'--dry-run {args.dry_run!r}: already exists; choose another name')
    from vit_jax.inference import load
    from vit_jax.interop import hub_push

    hub_push.check_repository(args.repository)
    trained = load.read(args.model, **run_options(args))
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.dry_run or f'{temporary}/files')
        measured = args.average == 1
        notes = hub_push.write_repository(trained, folder, args.repository, measured=measured)
        for note in (*trained.notes, *notes):
            print(f'note: {note}', file=sys.stderr)
        if args.dry_run is not None:
            print(f'{folder}: written')
            return 0
        print(hub_push.upload(folder, args.repository, private=args.private))
    return 0
