"""Names of settings in other trainers, and the flags that set them here."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

_NUMBER, _INTEGER = r'\d+(\.\d*)?(e-?\d+)?', r'\d+'
_NAME, _PATH = r'[A-Za-z]\w*', r'[^:]+'


class Setting(NamedTuple):
    """Setting of a run.

    Attributes:
      names: Its names in other trainers, separated by spaces.
      hint: Flags that set it, with `{}` for the value.
      example: Example of a value.
      pattern: Regular expression of the values of other trainers that are valid here too.
    """

    names: str
    hint: str
    example: str = ''
    pattern: str = _NUMBER


SETTINGS = (
    Setting('lr learning_rate base_lr blr lr0 peak_lr', '--config.optim.lr={}', '3e-4'),
    Setting(
        'epochs num_epochs num_train_epochs max_epochs total_epochs',
        "--config.total='{} epochs'",
        '20',
    ),
    Setting(
        'total steps num_steps max_steps total_steps train_steps',
        "--config.total='{} steps'",
        '1000',
    ),
    Setting(
        'batch_size bs batch per_device_train_batch_size train_batch_size',
        '--config.batch_size={}',
        '64',
        _INTEGER,
    ),
    Setting(
        'image_size img_size input_size imgsz resolution crop_size',
        "--config.data.transforms='resize({})', and --config.evals.NAME.transforms for evaluations",
        '224',
        _INTEGER,
    ),
    Setting('weight_decay wd', '--config.optim.weight_decay={}', '0.1'),
    Setting('optimizer opt', '--config.optim.name={}', 'adamw', _NAME),
    Setting('momentum', '--config.optim.momentum={}', '0.9'),
    Setting(
        'scheduler sched lr_scheduler lr_scheduler_type',
        '--config.optim.schedule.name={}',
        'cosine',
        'constant|linear|cosine|polynomial',
    ),
    Setting('warmup warmup_ratio', "--config.optim.schedule.warmup='{}'", '5%', r'\d+%'),
    Setting('warmup_epochs', "--config.optim.schedule.warmup='{} epochs'", '5'),
    Setting('warmup_steps', "--config.optim.schedule.warmup='{} steps'", '1000'),
    Setting(
        'clip_grad grad_clip grad_clip_norm max_grad_norm gradient_clip_val clip_norm',
        '--config.optim.clip_norm={}',
        '1.0',
    ),
    Setting(
        'accum_iter accum_freq gradient_accumulation_steps grad_accum_steps '
        'accumulate_grad_batches',
        '--config.step.accum_steps={}',
        '2',
        _INTEGER,
    ),
    Setting(
        'ema model_ema ema_decay model_ema_decay',
        '--config.step.ema_decay={}',
        '0.999',
        r'0?\.\d+',
    ),
    Setting('mixup mixup_alpha', '--config.task.mixup={}, 0 for none', '0.2'),
    Setting('cutmix cutmix_alpha', '--config.task.cutmix={}, 0 for none', '1.0'),
    Setting(
        'smoothing label_smoothing label_smoothing_factor',
        '--config.task.label_smoothing={}',
        '0.1',
    ),
    Setting('drop_path drop_path_rate', '--config.model.drop_path={}', '0.1'),
    Setting('drop drop_rate dropout dropout_rate', '--config.model.dropout={}', '0.1'),
    Setting('amp fp16 bf16 precision mixed_precision', '--config.model.dtype=bfloat16'),
    Setting('num_classes nb_classes', '--config.model.num_classes={}', '10', _INTEGER),
    Setting('seed random_seed', '--config.seed={}', '1', _INTEGER),
    Setting(
        'model arch model_name model_name_or_path', '--config.model.name={}', 'vit', '[a-z]{2,6}'
    ),
    Setting('task', '--config.task.name={}', 'classify', '[a-z_]+'),
    Setting('split train_split', '--config.data.split={}', 'train', _PATH),
    Setting(
        'data data_dir data_path dataset train_dir data_set source',
        '--config.data.source=folder:{}',
        '/PATH',
        _PATH,
    ),
    Setting(
        'workers num_workers dataloader_num_workers',
        '--config.data.workers={}',
        '4',
        _INTEGER,
    ),
    Setting(
        'pretrained pretrained_weights model_init init_from',
        '--config.init.from={}',
        'ViT-B_16.npz',
        r'\S*[./:]\S*',
    ),
    Setting(
        'patience early_stopping',
        '--config.early_stop.patience={} with --config.early_stop.metric',
        '5',
        _INTEGER,
    ),
    Setting('eval_every eval_freq evaluation_strategy', "--config.every.eval='1 epoch'"),
    Setting('eval_steps', "--config.every.eval='{} steps'", '500', _INTEGER),
    Setting('save_every', "--config.every.checkpoint='10%'"),
    Setting('save_steps ckpt_steps', "--config.every.checkpoint='{} steps'", '500', _INTEGER),
    Setting(
        'log_every logging_steps log_interval log_training_steps',
        "--config.every.log='{} steps'",
        '50',
        _INTEGER,
    ),
    Setting(
        'output output_dir out outdir out_dir log_dir save_dir',
        '--workdir {}',
        'runs/NAME',
        _PATH,
    ),
    Setting('resume resume_from_checkpoint', 'the same command, which resumes'),
    Setting(
        'device devices accelerator gpu gpus cuda n_gpu',
        'the environment variable JAX_PLATFORMS={}',
        'cpu',
        'cpu|cuda|tpu',
    ),
)


def find_hint(name: str, value: str = '') -> str:
    """Find the flags for a setting by its name in other trainers; empty if the name is unknown.

    Args:
      name: Flag or the last part of a config key, such as `--learning-rate` or `img_size`.
      value: Its value, which replaces the example if it is valid here; empty for none.
    """
    word = name.lower().lstrip('-').replace('-', '_')
    setting = next((s for s in SETTINGS if word in s.names.split()), None)
    if setting is None:
        return ''
    is_valid = re.fullmatch(setting.pattern, value)
    quoted = "'" in setting.hint
    suggestion = (
        value if is_valid and quoted else shlex.quote(value) if is_valid else setting.example
    )
    return setting.hint.format(suggestion)


def example(key: str) -> str:
    """Write a flag with an example for a config key such as `optim.lr`, or with VALUE."""
    flag = f'--config.{key}='
    hints = (find_hint(setting.names.split()[0]) for setting in SETTINGS)
    return next((hint for hint in hints if hint.startswith(flag)), f'{flag}VALUE').partition(',')[0]
