"""Which model a command is about: that of a run, or of a checkpoint of another code base."""

from __future__ import annotations

import argparse
import re
from typing import Any

from vit_jax.errors import UserError


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `open_model` reads."""
    parser.add_argument('--workdir', metavar='DIR', help='a run folder')
    parser.add_argument('--step', type=int, help='a kept checkpoint; the newest by default')
    parser.add_argument(
        '--checkpoint',
        metavar='FILE',
        help='instead of a run the weights of another code base: .npz, .safetensors, or a folder',
    )


def open_model(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    image_size: tuple[int, int] | None = None,
) -> Any:
    """The `runs.Run` of the flags.

    Args:
      parser: for its name.
      args: with the flags of `add_model_flags`.
      image_size: height and width of the images to come, if they are not the usual ones.

    Raises:
      UserError: if not exactly one model is named, or it cannot be read.
    """
    check_model_flags(parser, args)
    from vit_jax import runs

    if args.checkpoint is not None:
        return runs.load_foreign(args.checkpoint, image_size)
    return runs.load_run(args.workdir, args.step, image_size)


def check_model_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raises UserError unless exactly one model is named."""
    if (args.workdir is None) == (args.checkpoint is None):
        parser.error('give one of --workdir DIR and --checkpoint FILE')
    if args.checkpoint is not None and args.step is not None:
        parser.error('--step is of a run: give it with --workdir')


def parse_size(text: str | None, flag: str) -> tuple[int, int] | None:
    """`224` -> (224, 224), `224x320` -> (224, 320), None -> None; UserError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', text)
    if match is None:
        raise UserError(f'{flag} {text}: write the side in pixels, or HEIGHTxWIDTH, as in 224x320')
    return int(match[1]), int(match[2] or match[1])
