"""The settings of a command that does one part of what a training run does, from a file that may be the config of the whole run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtkit.config import Layer, check_layer, is_config_of_run, parse_override, read_config


def part_layers(file: Path | None, overrides: Sequence[str], cls: type[Any], *, table: str) -> list[Layer]:
    """What a config file and `--set` say, the weakest first.

    Args:
        file: TOML, or None. The preset that it names counts before its own keys, as in `mtkit train`.
        overrides: Words of `--set`.
        cls: The dataclass of the settings.
        table: Its name in the config of a run.

    Raises:
        ConfigError: The file cannot be read, has a key that a run's config lacks, or names a preset that there is not; or a word is not of the form
            key=value.
    """
    layers = []
    if file is not None:
        tree = read_config(file)
        if is_config_of_run(tree, cls, table=table):
            from mtkit.training.config import TrainConfig, preset

            check_layer(TrainConfig, Layer(name=str(file), data={key: value for key, value in tree.items() if key != "preset"}))
            if (name := tree.get("preset")) is not None:
                layer = preset(str(name))
                layers.append(Layer(name=layer.name, data=layer.data.get(table, {})))
            tree = tree.get(table, {})
        layers.append(Layer(name=str(file), data=tree))
    return layers + [Layer(name=f"--set {text}", data=parse_override(text)) for text in overrides]
