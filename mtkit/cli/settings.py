"""The settings of a command that does one part of what a training run does, from a file that may be the config of the whole run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtkit.config import Layer, parse_override, read_config, read_layer


def part_layers(file: Path | None, overrides: Sequence[str], cls: type[Any], *, table: str) -> list[Layer]:
    """What a config file and `--set` say, the weakest first.

    Args:
        file: TOML, or None. The preset that it names counts before its own keys, as in `mtkit train`.
        overrides: Words of `--set`.
        cls: The dataclass of the settings.
        table: Its name in the config of a run.

    Raises:
        ConfigError: The file cannot be read, or names a preset that there is not; or a word is not of the form key=value.
    """
    layers = []
    if file is not None:
        if (name := read_config(file).get("preset")) is not None:
            from mtkit.training.config import preset

            layer = preset(str(name))
            layers.append(Layer(name=layer.name, data=layer.data.get(table, {})))
        layers.append(read_layer(file, cls, table=table))
    return layers + [Layer(name=f"--set {text}", data=parse_override(text)) for text in overrides]
