from pathlib import Path

import pytest

from mtkit.cli.settings import part_layers
from mtkit.config import resolve
from mtkit.data.tokenizer import TokenizerConfig
from mtkit.errors import ConfigError


def settings(text: str, directory: Path, *overrides: str) -> TokenizerConfig:
    (directory / "config.toml").write_text(text)
    return resolve(TokenizerConfig, part_layers(directory / "config.toml", overrides, TokenizerConfig, table="tokenizer")).config


def test_the_preset_of_a_run_counts_for_its_parts(tmp_path: Path) -> None:
    """`mtkit train` with the same file takes 8,000 pieces."""
    assert settings('preset = "tiny"\n', tmp_path).vocab_size == 8000
    assert settings('preset = "tiny"\n[tokenizer]\nseed = 5\n', tmp_path).vocab_size == 8000
    assert settings('preset = "tiny"\n[tokenizer]\nvocab_size = 500\n', tmp_path).vocab_size == 500
    assert settings('preset = "tiny"\n', tmp_path, "vocab_size=300").vocab_size == 300


def test_without_a_file_only_the_options_count() -> None:
    assert [layer.data for layer in part_layers(None, ["seed=3"], TokenizerConfig, table="tokenizer")] == [{"seed": 3}]


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no preset 'huge'"):
        settings('preset = "huge"\n', tmp_path)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[tokenizr]\nvocab_size = 600\n", "unknown key tokenizr", "Did you mean tokenizer?"),
        ("vocab_size = 500\n[tokenizer]\nseed = 2\n", "unknown key vocab_size", "Did you mean tokenizer.vocab_size?"),
        ("[tokenizer]\nseed = 2\n[preprocess.filtres]\nmax_length = 5\n", "unknown key preprocess.filtres", "Did you mean preprocess.filters?"),
    ],
)
def test_a_mistake_anywhere_in_the_config_of_a_run_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"config.toml: {message}") as error:
        settings(text, tmp_path)
    assert error.value.hint == hint
