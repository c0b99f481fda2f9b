"""OpenCLIP: its names on top of transformers' computation, and beside timm's stored outputs."""

import json
import re

import jax
import numpy as np
import pytest
from helpers import timm_forms, transformers_texts
from helpers.round_trips import anew
from helpers.transformers_clip import (
    MEAN,
    OLD_END,
    SIZE,
    STD,
    VOCAB,
    batch,
    ours,
    reference,
    theirs,
)

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import _timm
from vit_jax.tree_paths import param_paths

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')
pytest.importorskip('safetensors')

# transformers' names, and those of open_clip.
NAMES = {
    r'(text|vision)_model\.encoder\.layers': r'\1_model.transformer.resblocks',
    r'(.*)\.self_attn\.out_proj': r'\1.attn.out_proj',
    r'(.*)\.self_attn\.(q|k|v)_proj': r'\1.attn.\2',
    r'(.*)\.layer_norm(\d)': r'\1.ln_\2',
    r'(.*)\.mlp\.fc1': r'\1.mlp.c_fc',
    r'(.*)\.mlp\.fc2': r'\1.mlp.c_proj',
    r'vision_model\.embeddings\.class_embedding': 'visual.class_embedding',
    r'vision_model\.embeddings\.patch_embedding': 'visual.conv1',
    r'vision_model\.embeddings\.position_embedding\.weight': 'visual.positional_embedding',
    r'vision_model\.pre_layrnorm': 'visual.ln_pre',
    r'vision_model\.post_layernorm': 'visual.ln_post',
    r'vision_model\.': 'visual.',
    r'visual_projection\.weight': 'visual.proj',
    r'text_model\.embeddings\.token_embedding': 'token_embedding',
    r'text_model\.embeddings\.position_embedding\.weight': 'positional_embedding',
    r'text_model\.final_layer_norm': 'ln_final',
    r'text_model\.': '',
    r'text_projection\.weight': 'text_projection',
}
CONFIG = {
    'model_cfg': {
        'embed_dim': 5,
        'quick_gelu': True,
        'vision_cfg': {
            **{'image_size': SIZE, 'layers': 2, 'width': 16, 'head_width': 8, 'patch_size': 4},
        },
        'text_cfg': {'context_length': 6, 'vocab_size': VOCAB, 'width': 8, 'heads': 4, 'layers': 2},
    },
    'preprocess_cfg': {
        **{'mean': list(MEAN), 'std': list(STD)},
        **{'interpolation': 'bicubic', 'resize_mode': 'squash'},
    },
}


def open_clip(model, text=''):
    """The arrays by open_clip's names; those of texts below `text`, as with `custom_text`."""
    flat, parts = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith('position_ids'):
            continue
        if name.startswith(('embeddings.', 'encoder.', 'final_layer_norm.')):  # a tower alone
            name = f'text_model.{name}'
        for old, new in NAMES.items():
            name = re.sub(f'^{old}', new, name)
        if not name.startswith(('visual.', 'logit_scale')):
            name = text + name
        if match := re.fullmatch(r'(.*\.attn)\.([qkv])\.(weight|bias)', name):
            parts.setdefault(f'{match[1]}.in_proj_{match[3]}', {})[match[2]] = tensor.numpy()
        else:
            is_projection = name.endswith(('visual.proj', 'text_projection'))
            flat[name] = (tensor.T if is_projection else tensor).numpy()
    return flat | {n: np.concatenate([part[x] for x in 'qkv']) for n, part in parts.items()}


def save(folder, flat, config=CONFIG):
    files.write_safetensors(folder / 'open_clip_model.safetensors', flat)
    (folder / 'open_clip_config.json').write_text(json.dumps(config))
    return folder


@pytest.mark.parity
@pytest.mark.parametrize('text', ['', 'text.'])
def test_logits(text, tmp_path):
    model, data = reference(eos=OLD_END), batch(VOCAB - 1)
    flat = open_clip(model, text)
    assert {'visual.proj', f'{text}text_projection', f'{text}ln_final.weight'} <= flat.keys()
    trained = interop.read(save(tmp_path, flat))
    assert trained.notes == () and trained.config.model.name == 'clip'
    assert f"resize(({SIZE}, {SIZE}), 'bicubic')" in trained.transforms
    logits, loss = ours(trained, data)
    expected = theirs(model, data)
    scale = float(expected.logits_per_image.abs().max())
    np.testing.assert_allclose(logits, expected.logits_per_image, atol=1e-5 * scale)
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)


def test_towers(tmp_path):
    model = reference(eos=OLD_END)
    save(tmp_path, open_clip(model))
    whole = interop.read(tmp_path)
    vision, text = interop.read(f'{tmp_path}:vision'), interop.read(f'{tmp_path}:text')
    kernel = whole.params['image']['patch_embed']['kernel']
    np.testing.assert_array_equal(vision.params['patch_embed']['kernel'], kernel)
    projection = model.visual_projection.weight.detach().numpy().T
    np.testing.assert_array_equal(vision.params['head']['kernel'], projection)
    assert text.config.model.name == 'text_encoder' and text.model_config['num_classes'] == 5


def test_what_is_refused_is_named(tmp_path):
    flat = open_clip(reference())

    def changed(tower, **keys):
        model = CONFIG['model_cfg']
        return CONFIG | {'model_cfg': model | {tower: model[tower] | keys}}

    for config, message in [
        (changed('vision_cfg', attentional_pool=True), 'vision_cfg.attentional_pool True'),
        (changed('text_cfg', hf_model_name='roberta'), "text_cfg.hf_model_name 'roberta'"),
        (changed('vision_cfg', layers=[3, 4, 6, 3]), 'the ResNet of vision_cfg.layers'),
    ]:
        with pytest.raises(UserError, match=f'OpenCLIP: .*{re.escape(message)}'):
            interop.read(save(tmp_path, flat, config))
    more = {'visual.transformer.resblocks.0.ls_1.gamma': np.ones(16, np.float32)}
    save(tmp_path, flat | more)
    with pytest.raises(UserError, match=r'called.*visual.transformer.resblocks.0.ls_1'):
        interop.read(tmp_path)
    save(tmp_path, flat)
    (tmp_path / 'open_clip_config.json').unlink()
    with pytest.raises(UserError, match=r'open_clip_config\.json'):
        interop.read(tmp_path)


def test_what_is_read_is_written_again(tmp_path):
    """Bit for bit if it is the same model, else with the same arrays."""
    flat = open_clip(reference(eos=OLD_END))
    place, again = save(tmp_path / 'made', flat), tmp_path / 'again'
    assert cli.main(['convert', str(place), f'open_clip:{again}']) == 0
    for name in ('open_clip_model.safetensors', 'open_clip_config.json'):
        if name.endswith('.json'):
            assert (place / name).read_bytes() == (again / name).read_bytes()
    imported = interop.read(place)
    assert interop.write(anew(imported), f'open_clip:{tmp_path}/new') == ()
    for folder in (again, tmp_path / 'new'):
        stored, _ = files.read_stored(folder / 'open_clip_model.safetensors')
        assert stored.keys() == flat.keys()
        for name, array in flat.items():
            np.testing.assert_array_equal(stored[name], array, err_msg=name)
    read = interop.read(tmp_path / 'new')
    told = [(m.model_config, m.task_config, m.transforms, m.image_size) for m in (imported, read)]
    assert told[0] == told[1]
    other = imported.with_groups(model=imported.model_config | {'eos': 3})
    with pytest.raises(UserError, match=r'largest.*3'):
        interop.write(other, f'open_clip:{tmp_path}/other')


TIMM = json.loads(timm_forms.GOLDEN.read_text())
# Of texts: as in CLIP, and as in SigLIP.
CAUSAL = {'heads': 4}
PLAIN = {'heads': 4, 'no_causal_mask': True, 'proj_bias': True, 'pool_type': 'last'}
PLAIN |= {'act_kwargs': {'approximate': 'tanh'}, 'norm_kwargs': {'eps': 1e-6}}
TOWERS = {
    'eva02_base_patch16_clip_224': CAUSAL,
    'vit_pe_core_base_patch16_224': CAUSAL,
    'vit_base_patch16_siglip_224': PLAIN,
}


def beside_timm(name, monkeypatch):
    """The arrays and the config of a stored model of timm beside a text tower of transformers, and
    the embeddings of both.
    """
    row, words = TIMM[name], TOWERS[name]
    known = dict(_timm.architectures())
    known[name] = {**known[name], 'embed_dim': row['config']['model_args']['embed_dim']}
    monkeypatch.setattr(_timm, 'architectures', lambda: known)
    kind = 'CLIPTextModelWithProjection' if words is CAUSAL else 'SiglipTextModel'
    fields = {'projection_dim': 3, 'eos_token_id': 2} if words is CAUSAL else {'projection_size': 3}
    model = transformers_texts.reference(
        kind, fields | {'hidden_act': 'gelu'} if words is CAUSAL else fields
    )
    ids = transformers_texts.ids()
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(ids).long())
    text = found['text_embeds' if words is CAUSAL else 'pooler_output'].numpy()
    flat = {f'visual.trunk.{n}': a for n, a in timm_forms.parameters(row['shapes']).items()}
    renamed = {n.replace('head.', 'text_projection.'): a for n, a in open_clip(model).items()}
    flat |= {f'text.{n}': a for n, a in renamed.items()}
    flat['logit_scale'] = np.float32(0.5)
    if words is PLAIN:
        flat['logit_bias'] = np.float32(-1.5)
    side = row['config']['pretrained_cfg']['input_size'][1]
    vision = {'timm_model_name': name, 'timm_proj': None, 'image_size': side}
    vision['timm_pool'] = row['config']['global_pool']
    config = {
        'model_cfg': {'embed_dim': 3, 'vision_cfg': vision, 'text_cfg': words},
        'preprocess_cfg': {key: row['config']['pretrained_cfg'][key] for key in ('mean', 'std')},
    }
    return flat, config, np.array([row['logits']]), text, ids


@pytest.mark.parametrize('name', TOWERS)
def test_towers_of_timm(name, tmp_path, monkeypatch):
    flat, config, image, text, ids = beside_timm(name, monkeypatch)
    trained = interop.read(save(tmp_path, flat, config))
    assert trained.config.model.name == 'open_clip'
    images = timm_forms.images(trained.image_size[0])
    mean, std = (np.array(getattr(trained.task, key)) for key in ('mean', 'std'))
    images = ((images + 1) / 2 - mean) / std if mean.size else images
    outputs = jax.jit(trained.model.apply)(trained.variables, images.astype(np.float32), ids)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (image, text)]
    np.testing.assert_allclose(outputs['image'], unit[0], atol=1e-5)
    np.testing.assert_allclose(outputs['text'], unit[1], atol=1e-5)
    assert float(outputs['scale']) == pytest.approx(np.exp(0.5))
    assert float(outputs['bias']) == (-1.5 if TOWERS[name] is PLAIN else 0)
    vision, words = interop.read(f'{tmp_path}:vision'), interop.read(f'{tmp_path}:text')
    assert vision.model_config['num_classes'] == words.model_config['num_classes'] == 3
    again = param_paths(trained.params['text'])
    for path, array in param_paths(words.params).items():
        np.testing.assert_array_equal(array, again[path])


def test_towers_that_are_refused(tmp_path, monkeypatch):
    flat, config, *_ = beside_timm('eva02_base_patch16_clip_224', monkeypatch)
    model = config['model_cfg']

    def changed(**towers):
        return config | {'model_cfg': model | {k: {**model[k], **v} for k, v in towers.items()}}

    for other, message in [
        (changed(vision_cfg={'timm_proj': 'linear'}), "vision_cfg.timm_proj 'linear'"),
        (
            changed(vision_cfg={'timm_model_name': 'convnext_base'}),
            "timm_model_name 'convnext_base'",
        ),
        (changed(text_cfg={'pool_type': 'last'}), "text_cfg.pool_type 'last'"),
        (changed(text_cfg={'hf_model_name': 'roberta'}), "text_cfg.hf_model_name 'roberta'"),
        ({**config, 'model_cfg': {**model, 'multimodal_cfg': {}}}, 'multimodal_cfg'),
    ]:
        with pytest.raises(UserError, match=re.escape(message)):
            interop.read(save(tmp_path, flat, other))
    words = {'text.transformer.embeddings.weight': np.ones((3, 4), np.float32)}
    trunk = {name: array for name, array in flat.items() if name.startswith('visual.')}
    save(tmp_path, trunk | words, changed(text_cfg={'hf_model_name': 'roberta'}))
    with pytest.raises(UserError, match=r'text_cfg\.hf_model_name .*FILE:vision'):
        interop.read(tmp_path)
    assert interop.read(f'{tmp_path}:vision').config.model.name == 'vit'
