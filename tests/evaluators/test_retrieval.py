"""Recall both ways, beside a count by hand."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.evaluators import retrieval


def unit(rng, rows):
    x = rng.normal(size=(rows, 6))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def measured(images, texts, ids=None, image_id=None, ks=(1, 5), size=7):
    evaluator = retrieval.Evaluator(ks=ks)
    rows = np.arange(len(images))
    ids = rows if ids is None else np.asarray(ids)
    for i in range(0, len(rows), size):
        part = slice(i, i + size)
        batch = {'caption': ids[part, None], 'index': rows[part]}
        if image_id is not None:
            batch['image_id'] = np.asarray(image_id)[part]
        evaluator.update({'features': images[part], 'text': texts[part]}, batch)
    assert set(evaluator.names()) == {f'{a}_recall_{k}' for a in ('text', 'image') for k in ks}
    return evaluator.result()


def test_recall_counts_ranks(monkeypatch):
    rng = np.random.default_rng(0)
    texts = unit(rng, 40)
    images = unit(rng, 40) * 0.5 + texts
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    monkeypatch.setattr(retrieval, 'ROWS', 9)
    found = measured(images, texts)
    cosines = images @ texts.T
    for name, scores in (('text', cosines), ('image', cosines.T)):
        ranks = (scores > np.diag(scores)[:, None]).sum(1)
        for k in (1, 5):
            assert found[f'{name}_recall_{k}'] == pytest.approx((ranks < k).mean())
    assert 0 < found['text_recall_1'] < found['text_recall_5']


def test_any_of_several_texts_is_right_and_equal_texts_are_one():
    texts = np.eye(6, dtype=np.float32)[[0, 1, 2, 0]]
    images = np.eye(6, dtype=np.float32)[[1, 1, 2, 0]]
    # The first two rows are of one image, near to its second text; rows 0 and 3 have equal texts.
    found = measured(images, texts, ids=[0, 1, 2, 0], image_id=[5, 5, 6, 7], ks=(1,))
    assert found == {'text_recall_1': 1.0, 'image_recall_1': 1.0}
    alone = measured(images, texts, ks=(1,))
    assert alone['text_recall_1'] < 1


def test_embeddings_that_are_all_alike_find_nothing():
    same = np.ones((4, 6), np.float32)
    found = measured(same, same, ks=(1, 3))
    assert set(found.values()) == {0.0}


def test_what_it_needs():
    with pytest.raises(UserError, match="there is no 'text'"):
        retrieval.Evaluator().update({'features': np.ones((1, 2))}, {'index': np.zeros(1, int)})
    with pytest.raises(UserError, match=r'ks=\(0,\)'):
        retrieval.Evaluator(ks=(0,))
