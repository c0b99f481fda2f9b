"""Records that cannot be read are counted over a whole run, however often it was started."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.storage import run_folder


@pytest.fixture
def images(tmp_path):
    """Sixteen images, one of which is empty."""
    folder = tmp_path / 'images'
    for name in ('a', 'b'):
        (folder / name).mkdir(parents=True)
        for i in range(8):
            Image.fromarray(np.full((8, 8, 3), 9 * i, np.uint8)).save(folder / name / f'{i}.png')
    (folder / 'b' / '3.png').write_bytes(b'')
    return folder


@pytest.mark.slow
@pytest.mark.fault(54)
@pytest.mark.usefixtures('compiled_once')
def test_the_total_is_in_the_result_and_outlasts_a_restart(
    repo, images, tmp_path, capsys, one_device
):
    source, run = f'folder:{images}', tmp_path / 'run'
    keys = {'data.source': source, 'evals.test.source': source, 'evals.test.split': 'train'}
    flags = [f'--config.{k}={v}' for k, v in {**keys, 'batch_size': 16, 'total': 2}.items()]
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', *flags]
    assert main([*words, '--workdir', str(run)]) == 0
    result = run_folder.read_result(run)
    assert (result['train/broken_records'], result['test/broken_records']) == (1, 1)
    (_, reason), *more = run_folder.read_meta(run / 'checkpoints' / '2')['broken']
    assert 'b/3.png' in reason
    assert not more

    (run / 'result.json').unlink()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(images / 'b' / '3.png')
    assert main([*words, '--workdir', str(run)]) == 0
    result = run_folder.read_result(run)
    assert result['train/broken_records'] == 1
    assert 'test/broken_records' not in result
    assert 'train/broken_records 1.0' in capsys.readouterr().out
