"""A command on Cloud TPUs, as far as all launchers treat it alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import yaml

from vit_jax.launch import command, names

MOUNT = 'give --mount /data=gs://BUCKET --env TFDS_DATA_DIR=/data/FOLDER'


@dataclasses.dataclass(frozen=True)
class CloudJob:
    """A command to run on Cloud TPUs, with its resources.

    Attributes:
      words: the command, as `['train', '--config', ...]`.
      name: of the job.
      tpu: type of a slice, as `v5litepod-16`.
      spot: whether it may be preempted, at a lower price.
      restarts: limit on restarts after failures; those after a preemption do not count.
      env: environment variables of the command.
    """

    launcher: ClassVar[str]

    words: Sequence[str]
    name: str
    tpu: str
    _: dataclasses.KW_ONLY
    spot: bool = False
    restarts: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_command(self, hint: str) -> None:
        """Check what the command is told and where its data and results are.

        Raises:
          UserError: for invalid variables, data in a bucket (with the hint where else), or results
            that would be deleted with the machine.
        """
        names.check_variables(self.launcher, self.env)
        names.check_data(self.launcher, self.env, hint)
        command.require_bucket(self.launcher, self.words)


def yaml_text(fields: Mapping[str, Any]) -> str:
    """The fields as YAML that every parser reads alike: strings stay strings.

    Parsers differ in the words that they take for booleans, numbers, dates or nothing: `y` is one
    for Kubernetes alone. So strings are quoted, and those that end in a newline become blocks.
    """
    return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, width=float('inf'))


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes strings, except keys of more than a letter unless PyYAML does."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: Any = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if len(key.value) > 1:
                key.style = None
        return node


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        'tag:yaml.org,2002:str', value, style='|' if value.endswith('\n') else "'"
    )


_Dumper.add_representer(str, _text)
