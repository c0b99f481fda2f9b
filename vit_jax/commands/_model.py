"""Flags that name a model: a run, or a checkpoint of any project."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.commands._parser import add_allow_flag, add_subject
from vit_jax.errors import UserError, positive_number

MODEL_FLAGS = ('--workdir', '--checkpoint')
RUN = 'run folder; RUN@STEP or RUN@best selects a checkpoint other than the newest'
MODEL = (
    f'{RUN}; or a checkpoint of any project: a file, a folder, a URL such as '
    'hf://google/vit-base-patch16-224, or a name of `list checkpoints`'
)


def add_model_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add MODEL, and the flags that `open_model` reads.

    Args:
      parser: Parser to extend, before its other positional arguments.
      argv: Command line, in which `--workdir` or `--checkpoint` may replace MODEL.
    """
    add_subject(parser, argv, 'model', MODEL_FLAGS, metavar='MODEL', help=MODEL)
    parser.add_argument('--workdir', metavar='RUN', help='run folder, instead of MODEL')
    parser.add_argument(
        '--checkpoint', metavar='FILE', help='checkpoint of any project, instead of MODEL'
    )
    add_image_size_flag(parser)
    add_checkpoint_flags(parser)
    parser.add_argument(
        '--adaptor',
        default='',
        metavar='NAME',
        help="adaptor of a run of the task agglomerate: the features are a teacher's, as the "
        "student predicts them (default: the student's own)",
    )


def add_image_size_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that `image_size` reads."""
    parser.add_argument(
        '--image-size',
        metavar='PIXELS',
        help='size to which images are resized and cropped, or padded where the run pads: the '
        "side of a square, or width=W,height=H (default: the model's)",
    )


def add_run_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add RUN, the flag `--workdir` that may replace it, and the flags that choose its checkpoint.

    Both RUN and `--workdir` set the attribute `workdir`.
    """
    add_subject(parser, argv, 'workdir', ('--workdir',), metavar='RUN', help=RUN)
    parser.add_argument(
        '--workdir', metavar='RUN', default=argparse.SUPPRESS, help='run folder, instead of RUN'
    )
    add_checkpoint_flags(parser)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the checkpoint of a run."""
    parser.add_argument(
        '--step',
        type=_parse_step,
        metavar='STEP|best',
        help='saved step, or the best by config.checkpoint.keep_best (default: the newest)',
    )
    parser.add_argument(
        '--average',
        type=_parse_average,
        default=1,
        metavar='N|DECAY|none',
        help='number of checkpoints to average, the last of them --step; or the decay of one of '
        "the run's averages (config.step.ema_decay), such as 0.9999; or none for the parameters "
        'themselves (default: the newest checkpoint, the first average)',
    )
    add_allow_flag(parser)


def _parse_step(text: str) -> int | str:
    if text == 'best':
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step's number nor best") from None


def _parse_average(text: str) -> int | float | str:
    if text == 'none':
        return text
    try:
        decay = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text!r} is neither a number of checkpoints, a decay such as 0.9999, nor none'
        ) from None
    return decay if 0 < decay < 1 else positive_number(text)


def check_model_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set `args.model` to the model that the flags name; raise UserError unless there is one."""
    names = [text for text in (args.model, args.workdir, args.checkpoint) if text is not None]
    if len(names) != 1:
        parser.error('name one model: MODEL, --workdir RUN or --checkpoint FILE')
    of_runs = args.step is not None or args.average != 1 or args.adaptor
    if args.checkpoint is not None and of_runs:
        parser.error('--step, --average and --adaptor apply to runs: name one, not --checkpoint')
    args.model = names[0]


def image_size(args: argparse.Namespace) -> tuple[int, int] | None:
    """Parse `--image-size` as (height, width): '224', or 'width=320,height=224' in any order.

    Raises:
      UserError: The text is anything else, such as '224x320' (ambiguous order), or too large.
    """
    if (text := args.image_size) is None:
        return None
    height, width = _parse_sides(text)
    from vit_jax.data.images import MAX_PIXELS

    if height * width > MAX_PIXELS:
        raise UserError(f'--image-size {text}: too large; the limit is {MAX_PIXELS:,} pixels')
    return height, width


def _parse_sides(text: str) -> tuple[int, int]:
    number = r'([1-9]\d*)'
    for form, order in (
        (f'height={number},width={number}', 1),
        (f'width={number},height={number}', -1),
    ):
        if match := re.fullmatch(form, text):
            height, width = map(int, match.groups()[::order])
            return height, width
    match = re.fullmatch(f'{number}(?:x{number})?', text)
    if match is None:
        raise UserError(
            f'--image-size {text}: write the side of a square in pixels, such as 224, or '
            'width=320,height=224'
        )
    first, second = int(match[1]), int(match[2] or match[1])
    if first != second:  # a height and a width in earlier releases, the reverse in other tools
        raise UserError(
            f'--image-size {text} is ambiguous: write width={second},height={first}, its meaning '
            'in earlier releases, or the reverse'
        )
    return first, second


def task_name(args: argparse.Namespace) -> str:
    """Read the name of the model's task; a checkpoint is read once and stored in `args.stored`.

    Raises:
      UserError: The folder does not contain a run, the checkpoint cannot be read, its config names
        code that is not allowed, or no device is usable.
    """
    from vit_jax.inference import load
    from vit_jax.runtime import mesh
    from vit_jax.storage import run_folder
    from vit_jax.storage.model_ref import ModelRef

    mesh.usable_devices()
    run = ModelRef.parse(args.model).find_run()
    folder = args.workdir if run is None else run.folder.parent
    if folder is not None and (args.workdir or run_folder.read_config(folder) is not None):
        return load.read_config(folder, args.allow).task.name
    args.stored = load.read(args.model, image_size=image_size(args), **run_options(args))
    return args.stored.settings.task.name


def open_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Any:
    """Open the `TrainedModel` that the flags of `add_model_flags` name.

    Raises:
      UserError: Not exactly one model is named, it cannot be read, or no device is usable.
    """
    if args.model is None:
        check_model_flags(parser, args)
    size = image_size(args)
    from vit_jax.inference import load
    from vit_jax.runtime import mesh

    mesh.usable_devices()
    if args.workdir is not None:
        return load.open_run(args.workdir, size, **run_options(args))
    stored = getattr(args, 'stored', None)
    return load.open_model(args.model, size, stored=stored, **run_options(args))


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the flags of a model or run to keywords of `inference.load`'s functions."""
    options = {'step': args.step, 'average': args.average, 'allowed': args.allow}
    return options | ({'adaptor': args.adaptor} if 'adaptor' in args else {})
