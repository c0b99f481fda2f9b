"""`push`: repositories in a server on this machine that speaks the Hub's protocol."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.hub_server import Hub, serve

import vit_jax
from vit_jax.__main__ import main
from vit_jax.storage import paths, run_folder

hub = pytest.importorskip('huggingface_hub')
REPO = 'lab/digits'


@pytest.fixture
def run(repo):
    return repo / 'tests' / 'golden' / 'run_digits'


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serve(Hub(), tmp_path / 'hub') as served:
        monkeypatch.setenv('HF_TOKEN', served.token)
        yield served


def test_a_pushed_run_loads_again_and_has_a_card(run, server, capsys):
    assert main(['push', str(run), REPO]) == 0
    assert server.url in capsys.readouterr().out
    files = server.repos[REPO]['main']
    assert files.keys() == {
        *('README.md', 'config.json', 'model.safetensors', 'preprocessor_config.json')
    }
    stored, pushed = vit_jax.load(run)[1], vit_jax.load(f'hf://{REPO}')[1]
    assert len(jax.tree.leaves(stored)) > 10
    for path, values in jax.tree.leaves_with_path(stored):
        theirs = dict(jax.tree.leaves_with_path(pushed))[path]
        np.testing.assert_allclose(theirs, values, rtol=1e-6, err_msg=str(path))
    card = hub.ModelCard(files['README.md'].decode())
    assert server.card == files['README.md'].decode()
    assert (card.data.library_name, card.data.pipeline_tag) == (
        'transformers',
        'image-classification',
    )
    last = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    measured = {one.metric_name: one.metric_value for one in card.data.eval_results}
    assert measured == {name: last[name] for name in ('test/accuracy', 'test/loss')}
    assert {(one.dataset_type, one.dataset_split) for one in card.data.eval_results} == {
        ('digits', 'test')
    }


def test_a_model_without_another_form_is_a_run(repo, server, tmp_path, capsys):
    """A repository of a run, fetched by huggingface_hub."""
    run = repo / 'tests' / 'golden' / 'run_coltran_upsampler'
    folder = tmp_path / 'files'
    assert main(['push', str(run), REPO, '--dry-run', str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert not server.requests
    assert hub.ModelCard.load(folder / 'README.md').data.library_name == 'vit_jax'
    stored, written = vit_jax.load(run)[1], vit_jax.load(folder)[1]
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(a, b)
    assert main(['push', str(run), REPO, '--dry-run', str(folder)]) == 2  # it exists


def test_a_run_s_statistics_of_teachers_are_pushed(repo, server, tmp_path, capsys):
    run = shutil.copytree(repo / 'tests' / 'golden' / 'run_agglomerate', tmp_path / 'run')
    (run / 'statistics_1.npz').write_bytes(b'of the second teacher')
    assert main(['push', str(run), REPO, '--dry-run', str(tmp_path / 'files')]) == 0
    assert (tmp_path / 'files' / 'statistics_1.npz').read_bytes() == b'of the second teacher'
    assert run_folder.reason_reserved(run / 'statistics_1.npz')
    run_folder.clear(paths.path(run))
    assert not [*run.iterdir()]


@pytest.mark.parametrize(
    ('token', 'name', 'words'),
    [
        ('hf_wrong', REPO, 'HF_TOKEN'),
        ('hf_right', 'others/digits', 'right to write'),
        ('hf_right', 'digits', 'ORG/NAME'),
        ('hf_right', 'lab/a/b', 'lab/a/b'),
    ],
)
def test_errors_of_the_login_are_one_line(run, server, token, name, words, monkeypatch, capsys):
    monkeypatch.setenv('HF_TOKEN', token)
    assert main(['push', str(run), name]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert words in line
    assert not server.repos
