"""Files of predicted boxes in the formats of YOLO and Pascal VOC, for `predict --format`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from vit_jax.commands._parser import image_names, is_folder, writing
from vit_jax.errors import UserError, visible

FOLDERS = {'yolo': ('labels', '.txt'), 'voc': ('Annotations', '.xml')}  # and their files' suffix
FORMATS = (*FOLDERS, 'coco')
NAMES = 'data.yaml'  # YOLO's file with the names of the classes


def check_format_flag(args: argparse.Namespace, viz: Any) -> None:
    """Check `--format`; for COCO, move the file of `--out` to `--coco`.

    Raises:
      UserError: The task does not predict boxes, `--out` is not a new place for them, or a file
        exists there.
    """
    if args.format is None:
        return
    if 'bbox' not in viz.coco:
        raise UserError(f'--format {args.format} applies to detectors, such as task detect')
    if args.out is None:
        raise UserError(f'--format {args.format} is the format of --out: give both')
    if args.format == 'coco':
        if args.coco is not None:
            raise UserError('--format coco writes the file of --out: leave out --coco')
        args.coco, args.out = args.out, None
        return
    if not is_folder(args.out):
        raise UserError(f'--out {args.out!r}: --format {args.format} writes a folder')
    files = box_files(args.image, args.format)
    if len(set(files)) < len(files):
        raise UserError(f'--out {args.out!r}: two images have the same file: give each file once')
    for name in [*files, *([NAMES] if args.format == 'yolo' else ())]:
        if (pathlib.Path(args.out) / name).exists():
            raise UserError(f'--out {args.out!r}: {name} exists: choose another folder')


def box_files(images: Sequence[str], form: str | None) -> list[str]:
    """Return the file of each image's boxes, below the folder of `--out`."""
    folder, suffix = FOLDERS.get(form or '', ('', ''))
    return [f'{folder}/{name.removesuffix(".png")}{suffix}' for name in image_names(images)]


def write_boxes(
    out: str, file: str, photo: Any, rows: Sequence[Mapping[str, Any]], class_ids: Sequence[int]
) -> None:
    """Write the boxes of an image.

    Args:
      out: Folder.
      file: File below it; its suffix is the format.
      photo: Image.
      rows: Boxes, as returned by `Viz.rows` of a detector.
      class_ids: Category ids of the classes; empty if unknown.
    """
    size = photo.original.shape[:2]
    if file.endswith('.txt'):
        text = ''.join(f'{_yolo_line(row, size, class_ids)}\n' for row in rows)
    else:
        text = _voc_text(photo.path.name, size, rows)
    _write(out, file, text)


def write_names(out: str, results: Iterable[Mapping[str, Any]], context: Any) -> None:
    """Write the names of the classes for YOLO, or their numbers if the data had no names."""
    import yaml

    category_ids = [row['category_id'] for result in results for row in result['predictions']]
    count = len(context.class_names) or max(category_ids, default=-1) + 1
    names = map(context.class_name, range(count))
    _write(out, NAMES, yaml.safe_dump({'names': list(names)}, allow_unicode=True))


def _yolo_line(row: Mapping[str, Any], size: Sequence[int], class_ids: Sequence[int]) -> str:
    """Format class, center, width and height as shares of the image, and the score."""
    (height, width), (x, y, w, h) = size, row['bbox']
    label = class_ids.index(row['category_id']) if class_ids else row['category_id']
    values = (x + w / 2) / width, (y + h / 2) / height, w / width, h / height, row['score']
    return ' '.join([str(label), *(f'{value:.8f}' for value in values)])


def _voc_text(name: str, size: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> str:
    root = ElementTree.Element('annotation')
    _add(root, {'filename': visible(name)})
    sides = {'width': size[1], 'height': size[0], 'depth': 3}
    _add(ElementTree.SubElement(root, 'size'), sides)
    for row in rows:
        element = ElementTree.SubElement(root, 'object')
        facts = {'name': visible(row['class']), 'difficult': 0, 'confidence': row['score']}
        _add(element, facts)
        x, y, w, h = row['bbox']
        corners = {'xmin': x, 'ymin': y, 'xmax': x + w, 'ymax': y + h}
        box = ElementTree.SubElement(element, 'bndbox')
        _add(box, {corner: f'{value:.2f}' for corner, value in corners.items()})
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding='unicode') + '\n'


def _add(element: ElementTree.Element, texts: Mapping[str, Any]) -> None:
    for name, text in texts.items():
        child = ElementTree.SubElement(element, name)
        child.text = str(text)


def _write(out: str, file: str, text: str) -> None:
    from vit_jax.storage import paths

    target = paths.path(out) / file
    with writing(out, '--out'):
        paths.make_folder(target.parent)
        paths.write_text_atomic(target, text)
