"""`panoptic:PATH`: images with every pixel assigned to a thing or to stuff, in COCO format.

    PATH/panoptic_SPLIT.json, or PATH/annotations/panoptic_SPLIT.json
    next to it panoptic_SPLIT/*.png, whose colors are segment numbers: R + 256 G + 256^2 B
    PATH/SPLIT/*.jpg, PATH/images/SPLIT/*.jpg, PATH/images/*.jpg or PATH/*.jpg

Kirillov et al., 2019, arXiv:1801.00868. Categories are renumbered without the gaps in their ids.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import BrokenRecord, Listing, Record, SourceInfo, count_labels
from vit_jax.data.sources import coco
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

PREFIX = 'panoptic_'


class Source:
    """Records {image, masks, boxes, labels, crowd, areas, ids}, sorted by image id.

    The objects are the segments, both things and stuff, with the smallest boxes around their
    pixels. A segment without pixels is dropped, and a pixel without a segment is in no mask. A file
    without segments makes records {image}.

    Evaluations use `annotations`: all listed segments; one without pixels counts as missed.
    """

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        name = self._name = f'source panoptic:{path}'
        file = self._file = coco.find_annotations(root, split, PREFIX, name)
        content = coco.read_json(file, name)
        with coco.coco_format(file, name):
            categories = coco.list_categories(content)
            self._labels = {category['id']: i for i, category in enumerate(categories)}
            names = tuple(str(category['name']) for category in categories)
            stuff = tuple(i for i, category in enumerate(categories) if not _is_thing(category))
            self.info = SourceInfo(
                len(categories), names, stuff=stuff, class_ids=tuple(self._labels)
            )
            self._images = coco.list_images(content)
            self._folder = coco.image_folder(root, split, self._images, name)
            annotation_list = content.get('annotations') or []
            self._segments = {
                coco.read_id(row, 'image_id', 'an annotation'): self._check_segments(row)
                for row in annotation_list
            }
            coco.require_inside(self._segments.values())
            self._is_bare = not any(annotation['segments_info'] for annotation in annotation_list)
            if not self._is_bare:
                self._require_annotations()
        if self._is_bare:
            log.warning('%s: %s', file, coco.NO_ANNOTATIONS)
        self._pngs = file.with_suffix('')
        if not (self._is_bare or self._pngs.is_dir()):
            raise UserError(f'{name}: the folder {self._pngs} with the segments does not exist')

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> Record:
        path = self._folder / self._images[index]['file_name']
        record = self.annotations(index)
        image = coco.read_image(path, record.pop('size'))
        if not self._is_bare:
            has_pixels = record['areas'] > 0
            record = {name: array[has_pixels] for name, array in record.items()}
        return {'image': image, **record}

    def annotations(self, index: int) -> Record:
        """Return all listed segments, and the image's `size`, height and width.

        A segment without pixels has an empty mask, and a box of zeros.

        Raises:
          BrokenRecord: if a file cannot be read, or has an unlisted segment.
        """
        image = self._images[index]
        size = image['height'], image['width']
        if self._is_bare:
            return {'size': size}
        image_segments = self._segments[image['id']]
        path = self._pngs / image_segments['file_name']
        colors = images.read_values(path, colors=True)
        coco.require_size(path, colors, size)
        numbers = colors @ [1, 256, 256**2]
        segments = image_segments['segments_info']
        present, areas = np.unique(numbers, return_counts=True)
        if unknown := set(present.tolist()) - {0, *(segment['id'] for segment in segments)}:
            raise BrokenRecord(f'{path}: segment {min(unknown)} is not listed')
        area = dict(zip(present.tolist(), areas.tolist(), strict=True))
        masks = np.zeros((len(segments), *size), bool)
        for mask, segment in zip(masks, segments, strict=True):
            mask[:] = numbers == segment['id']
        return {
            'size': size,
            'masks': masks,
            'boxes': boxes_around(masks),
            'labels': np.array([self._labels[s['category_id']] for s in segments], np.int32),
            'crowd': np.array([s['iscrowd'] for s in segments], bool),
            'areas': np.array([area.get(s['id'], 0) for s in segments], np.float32),
            'ids': np.array([s['id'] for s in segments], np.int64),
        }

    def labels(self) -> np.ndarray:
        raise UserError(f'{self._name}: images have segments instead of one class')

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        segments_of_images = (
            self._segments.get(self._images[i]['id'], {}) for i in indices.tolist()
        )
        segments = [
            segment for image in segments_of_images for segment in image.get('segments_info', ())
        ]
        labels = np.array([self._labels[segment['category_id']] for segment in segments], np.int64)
        return count_labels(labels, self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest the whole annotation file, and the sizes of images and PNG files."""
        image_records = [self._images[i] for i in indices.tolist()]
        sizes = [
            listing.digest_of_sizes(self._folder, [image['file_name'] for image in image_records])
        ]
        if not self._is_bare:
            names = [self._segments[image['id']]['file_name'] for image in image_records]
            sizes.append(listing.digest_of_sizes(self._pngs, names))
        contents = listing.digest_of(sizes) if all(sizes) else ''
        return Listing(listing.digest_of_file(self._file), contents)

    def record_name(self, index: int, /) -> str:
        return str(self._folder / self._images[index]['file_name'])

    def _check_segments(self, annotation: dict[str, Any]) -> dict[str, Any]:
        """Convert an annotation's ids to numbers; ValueError for an unknown category."""
        image = annotation['image_id']
        segments = []
        for segment in annotation['segments_info']:
            number = coco.read_number(segment, 'id', f'a segment of image {image}')
            name = f'segment {number} of image {image}'
            category = coco.read_number(segment, 'category_id', name)
            if category not in self._labels:
                raise ValueError(f'{name} refers to the unknown category {category}')
            crowd = coco.read_flag(segment, 'iscrowd', name)
            segments.append({'id': number, 'category_id': category, 'iscrowd': crowd})
        return {'file_name': annotation['file_name'], 'segments_info': segments}

    def _require_annotations(self) -> None:
        """Raise ValueError unless every image has an annotation."""
        for image in self._images:
            if image['id'] not in self._segments:
                raise ValueError(f'image {image["id"]} has no annotation')


def _is_thing(category: dict[str, Any]) -> bool:
    """Return whether a category is a thing; ValueError if that is missing."""
    name = f'category {category["id"]}'
    if category.get('isthing') is None:
        raise ValueError(f"{name}: 'isthing' is missing, 1 for things and 0 for stuff")
    return coco.read_flag(category, 'isthing', name)


def boxes_around(masks: np.ndarray) -> np.ndarray:
    """Return boxes (x0, y0, x1, y1) around masks [N H W], float32 [N 4]; zeros if empty."""
    boxes = np.zeros((len(masks), 4), np.float32)
    for box, mask in zip(boxes, masks, strict=True):
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        if len(rows):
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return boxes
