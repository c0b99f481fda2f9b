"""`predict --coco FILE`: results in the format of COCO, as pycocotools' `loadRes` reads them."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.commands._parser import check_output, writing
from vit_jax.errors import UserError, one_line


def add_coco_flags(parser: argparse.ArgumentParser) -> None:
    """Add the file of results, and what the ids of its images are read from."""
    parser.add_argument(
        '--coco',
        metavar='FILE',
        help="the objects as COCO's results too, which pycocotools' loadRes reads; with "
        '--threshold 0 for AP',
    )
    parser.add_argument(
        '--annotations',
        metavar='FILE',
        help='with --coco: the annotations in which the images have their ids; by default the '
        "files' names are these ids, as COCO's are",
    )


def image_ids(args: argparse.Namespace, viz: Any) -> list[int]:
    """The id of each image; empty without `--coco`.

    Raises:
      UserError: if the task finds no objects, or an image has no id.
    """
    if args.coco is None:
        if args.annotations is not None:
            raise UserError('--annotations gives ids to the images of --coco: give that too')
        return []
    if not viz.coco:
        raise UserError('--coco applies to tasks that find objects, such as detect')
    check_output(args.coco, '--coco')
    if args.annotations is not None:
        listed = _listed(args.annotations)
        return [_id_among(listed, file, args.annotations) for file in args.image]
    return [_id_of_name(file) for file in args.image]


def write_results(
    path: str, ids: Sequence[int], results: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> None:
    """Write the predictions of all images.

    Args:
      path: of the file.
      ids: of the images.
      results: the `predictions` of each.
      keys: of a prediction, that are written beside `image_id`.

    Raises:
      UserError: if the file cannot be written.
    """
    from vit_jax.storage import paths

    rows = [
        {'image_id': number, **{key: row[key] for key in keys}}
        for number, result in zip(ids, results, strict=True)
        for row in result['predictions']
    ]
    with writing(path, '--coco'):
        paths.write_text_atomic(path, json.dumps(rows) + '\n')


def warn_of_ids(run: Any) -> None:
    """Say that `category_id` is the number of the class where the ids are not known."""
    if not run.class_ids:
        note = 'the ids of its categories are not known: category_id numbers its classes from 0'
        print(f'{one_line(str(run.path))}: {note}', file=sys.stderr)


def _listed(path: str) -> dict[str, int]:
    """{file name: id} of the images of an annotation file."""
    from vit_jax.storage import paths

    try:
        content = paths.parse_json(paths.read_bytes(path, paths.TABLE))
        return {image['file_name']: int(image['id']) for image in content['images']}
    except OSError as e:
        raise UserError(f'--annotations {path!r} cannot be read: {e.strerror}') from e
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise UserError(
            f'--annotations {path!r} is not in the format of COCO: it has no images with id and '
            'file_name'
        ) from e


def _id_among(listed: Mapping[str, int], file: str, path: str) -> int:
    parts = pathlib.Path(file).absolute().parts
    tails = ('/'.join(parts[start:]) for start in range(1, len(parts)))
    found = next((listed[tail] for tail in tails if tail in listed), None)
    if found is None:
        raise UserError(f'--annotations {path!r} lists no image {file!r}')
    return found


def _id_of_name(file: str) -> int:
    stem = pathlib.Path(file).stem
    if not (stem.isascii() and stem.isdecimal()):
        raise UserError(
            f'--coco: the name of {file!r} is not an image id, as 000000397133.jpg is: give '
            '--annotations FILE, in which the images have their ids'
        )
    return int(stem)
