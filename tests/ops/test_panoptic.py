"""Segments made of masks that overlap: whose a pixel is, what becomes one, what is dropped."""

from types import SimpleNamespace

import numpy as np
import pytest

from vit_jax.ops import panoptic

SURE = 0.9


def merge(masks, labels=None, things=None, scores=None, **options):
    count = len(masks)
    labels = np.arange(count) if labels is None else np.array(labels)
    things = np.ones(count, bool) if things is None else np.array(things, bool)
    scores = np.full(count, SURE) if scores is None else np.array(scores)
    return panoptic.merge_segments(scores, labels, things, np.array(masks, np.float64), **options)


def bands(*levels, side=6):
    """A mask for each row of levels, which are those of columns of `side` pixels."""
    return np.repeat(np.array(levels, np.float64)[:, None], side, axis=1)


def test_a_pixel_goes_to_the_surest_mask_of_predictions_that_are_sure_enough():
    masks = bands([9, 9, 9, 9], [1, 1, 0, 0], [0, 0, 1, 1])
    found = merge(masks, scores=[0.85, 0.86, 0.99])
    np.testing.assert_array_equal(found.numbers, [[1, 1, 2, 2]] * 6)
    assert found.queries.tolist() == [1, 2]
    assert merge(masks, scores=[0.84, 0.6, 0.1], threshold=0.5).queries.tolist() == [0]


def test_nothing_is_sure():
    found = merge(bands([1, 1]), scores=[0.2])
    assert not found.numbers.any() and found.numbers.shape == (6, 2)
    assert not len(found.queries)


def test_stuff_of_one_class_is_one_segment_and_things_are_not():
    masks = bands([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])
    labels, things = [7, 7, 3, 3], [False, False, True, True]
    found = merge(masks, labels, things)
    # The second query has no pixel any more: its pixels go to what is surest without it.
    assert found.queries.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(found.numbers, [[1, 1, 2, 3]] * 6)


def test_pixels_of_fused_stuff_are_given_anew_once_something_is_dropped():
    """As the authors do: after the first time each pixel goes to what is left, whatever it is."""
    masks = bands([1, 0, 0], [0, 9, 0], [0, 1, 9])
    found = merge(masks, [7, 7, 3], [False, False, True])
    assert found.queries.tolist() == [0, 2]
    np.testing.assert_array_equal(found.numbers, [[1, 2, 2]] * 6)


def test_small_segments_are_dropped_until_there_are_none():
    masks = np.full((3, 4, 4), -1.0)
    masks[0] = 0
    masks[1, 0, :4] = 1  # 4 pixels
    masks[2, 1, :4], masks[2, 0, 0] = 1, 0.5  # 4 pixels, and a fifth without the second
    found = merge(masks)
    # Both are small at once: neither gets what the other leaves.
    assert found.queries.tolist() == [0]
    assert (found.numbers == 1).all()
    masks[1, 1, 0] = 2  # 5 pixels, and the third has 3
    found = merge(masks)
    assert found.queries.tolist() == [0, 1]
    assert (found.numbers == 2).sum() == panoptic.MIN_PIXELS


def test_pixels_are_counted_where_they_are_placed():
    masks = np.stack([np.zeros((4, 4)), np.eye(4)])
    assert merge(masks).queries.tolist() == [0]
    larger = merge(masks, place=lambda x: panoptic.resize_numbers(x, (8, 8)))
    assert larger.queries.tolist() == [0, 1]
    np.testing.assert_array_equal(larger.numbers, 1 + np.kron(np.eye(4), np.ones((2, 2))))

    def beside(numbers):
        return np.pad(numbers, 1, constant_values=-1)

    framed = merge(masks[:1], place=beside).numbers
    np.testing.assert_array_equal(framed, np.pad(np.ones((4, 4)), 1))


@pytest.mark.parametrize('size', [(3, 5), (7, 9), (10, 4)])
def test_numbers_are_resized_as_pillow_does(size):
    from PIL import Image

    numbers = np.random.default_rng(0).integers(0, 200, (7, 9))
    image = Image.fromarray(numbers.astype(np.uint8)).resize(size[::-1], Image.Resampling.NEAREST)
    np.testing.assert_array_equal(panoptic.resize_numbers(numbers, size), np.asarray(image))


def test_of_a_prediction_the_padding_is_cut_off():
    """Masks of half of the padded image, of which 6 x 4 pixels are real."""
    prediction = {
        'scores': np.array([0.1, 0.9, 0.95], np.float32),
        'labels': np.array([0, 1, 2]),
        'things': np.array([True, True, False]),
        'masks': np.array([[[9] * 3] * 4, [[5, -5, -5]] * 4, [[-5, 5, 5]] * 4], np.float32),
        'frame': np.array([8, 6]),
        'size': np.array([6, 4]),
    }
    found = panoptic.from_prediction(prediction, lambda numbers: numbers)
    assert found.queries.tolist() == [1, 2]
    np.testing.assert_array_equal(found.numbers, [[1, 1, 2, 2]] * 6)


# -- merging by overlap ----------------------------------------------------------------------------


def test_a_mask_that_others_mostly_cover_is_dropped():
    masks = bands([9, 9, 9, 9, 9], [-9, -9, -9, 9, -9], [-9, 9, 9, 9, 9])
    rows = np.array([0.95, 0.9, 0.99]), np.arange(3), np.ones(3, bool), masks
    found = panoptic.merge_by_overlap(*rows, threshold=0.8, overlap=0.1)
    assert found.queries.tolist() == [0, 2]  # the second has no pixel, the first a fifth of its own
    np.testing.assert_array_equal(found.numbers, [[1, 2, 2, 2, 2]] * 6)
    found = panoptic.merge_by_overlap(*rows, threshold=0.8, overlap=0.3)
    assert found.queries.tolist() == [2]
    np.testing.assert_array_equal(found.numbers, [[0, 1, 1, 1, 1]] * 6)
    found = panoptic.merge_by_overlap(*rows, threshold=0.995, overlap=0.3)
    assert not len(found.queries) and not found.numbers.any()


@pytest.mark.parity
def test_segments_are_those_of_transformers():
    """EoMT's processor: logits to the padded image, cropped, to the file's size, and merged."""
    torch = pytest.importorskip('torch')
    module = pytest.importorskip('transformers.models.eomt.image_processing_pil_eomt')
    rng, size, stuff = np.random.default_rng(0), (45, 70), (3, 4, 5)
    classes = rng.normal(0, 1, (4, 14, 7)).astype(np.float32)
    classes[np.arange(4)[:, None], np.arange(14), rng.integers(0, 7, (4, 14))] += 8
    coarse = rng.normal(-3, 4, (4, 14, 3, 3)).astype(np.float32)
    masks = torch.nn.functional.interpolate(torch.from_numpy(coarse), (16, 16), mode='bicubic')
    outputs = SimpleNamespace(
        class_queries_logits=torch.from_numpy(classes), masks_queries_logits=masks
    )
    frame = {'shortest_edge': 64, 'longest_edge': 64}
    processor = module.EomtImageProcessorPil()
    expected = processor.post_process_panoptic_segmentation(
        outputs, [size] * 4, overlap_mask_area_threshold=0.3, stuff_classes=list(stuff), size=frame
    )
    real = np.array([round(45 * 64 / 70), 64])
    counts = []
    for i in range(4):
        probs = np.exp(classes[i]) / np.exp(classes[i]).sum(-1, keepdims=True)
        labels = probs[:, :-1].argmax(-1)
        prediction = {
            'scores': np.where(probs.argmax(-1) == 6, 0, probs[:, :-1].max(-1)),
            'labels': labels,
            'things': ~np.isin(labels, stuff),
            'masks': masks[i].numpy(),
            'frame': np.array([64, 64]),
            'size': real,
        }
        found = panoptic.from_prediction(prediction, lambda x: x, 0.8, 0.3, size)
        # A share of exactly 0.3 would be kept here and dropped there.
        wrong = (found.numbers - 1 != expected[i]['segmentation'].numpy()).mean()
        assert wrong < 1e-3  # logits at a threshold, to rounding
        known = [segment['label_id'] for segment in expected[i]['segments_info']]
        assert labels[found.queries].tolist() == known
        counts.append(len(known))
    assert min(counts) >= 2 and max(counts) < 10, counts


def test_the_smallest_of_several_masks_has_the_pixel():
    masks = np.array([[[1, 1, 1, 1]], [[0, 1, 0, 0]], [[0, 1, 1, 0]]], bool)
    np.testing.assert_array_equal(panoptic.number(masks), [[1, 2, 3, 1]])
    truth = {'segments': np.array([[-1, 0, 2]], np.int16)}
    np.testing.assert_array_equal(panoptic.true_numbers(truth), [[0, 0, 2]])
