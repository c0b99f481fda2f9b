"""A config of one's own that leaves out all that has a default."""

import json
import pathlib
import re

import pytest

from vit_jax import __main__ as cli


@pytest.mark.slow
def test_the_config_in_the_documents_is_whole(
    repo, tmp_path: pathlib.Path, one_device, capsys
) -> None:
    page = (repo / 'docs' / 'configs.md').read_text()
    [code] = re.findall(r'`my_config.py`:\n\n```python\n(.*?)```', page, re.DOTALL)
    config, run = tmp_path / 'my_config.py', tmp_path / 'run'
    config.write_text(code)
    tiny = ['--config.total=1', '--config.model.depth=1', '--config.batch_size=90']
    assert cli.main(['train', '--config', str(config), '--workdir', str(run), *tiny]) == 0
    assert 'evaluates' in capsys.readouterr().out
    assert 'test/accuracy' in json.loads((run / 'result.json').read_text())
    stored = json.loads((run / 'config.json').read_text())
    assert stored['seed'] == 0
    assert stored['model']['num_classes'] == 10
    assert stored['evals']['test']['source'] == 'digits'
