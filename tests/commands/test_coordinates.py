"""`scaling coordinates`: changes of layers over width, as a table and a picture."""

import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main

MUP = '--config.optim.parametrization=mup(width=32, mlp_dim=64, num_heads=4)'
COMMAND = ('scaling', 'coordinates', '--config', 'vit/digits:smoke')


@pytest.mark.long
@pytest.mark.parametrize('scan', [False, True])
def test_changes_grow_with_the_width_unless_they_are_scaled(scan, tmp_path, capsys, one_device):
    picture = tmp_path / 'check.png'
    flags = ('--multiples', '8,1', '--steps', '4', '--output', str(picture))
    assert main([*COMMAND, MUP, f'--config.model.scan={scan}', *flags]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:-1]]
    growth = {(row[0], row[1]): float(row[-1]) for row in rows}
    layers = {layer for _, layer in growth}
    assert layers == {'encoder/block_0', 'tokens', 'pre_logits', 'logits'}
    assert growth['standard', 'logits'] > 2.5
    assert all(growth['mup', layer] < 2 for layer in layers)
    assert Image.open(picture).width > 500


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['scaling', 'coordinates'], ('scaling', 'coordinates')),
        ([*COMMAND, MUP, '--multiples', '1,x'], ('--multiples', "'1,x'")),
        ([*COMMAND, MUP, '--multiples', '2'], ('whole', 'numbers')),
        ([*COMMAND, MUP, '--steps', '0'], ('--steps', '1')),
        ([*COMMAND, MUP, '--output', 'a.gif'], 'a.gif'),
        ([*COMMAND], 'config.optim.parametrization'),
        (
            [*COMMAND, '--config.optim.parametrization=mup(hight=3)'],
            ('config.model', "'hight'"),
        ),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert main(argv) == 2
    output = capsys.readouterr()
    assert mentions(output.err, message)
    assert output.err.count('\n') == 1
    assert not output.out
