from pathlib import Path

import pytest

from mtkit.cli.train import resolve_config
from tests.helpers import REPOSITORY

RECIPES = REPOSITORY / "recipes"
CONFIGS = sorted(RECIPES.glob("**/config*.toml"))


def test_the_recipes_have_configs() -> None:
    assert {path.parent.name for path in CONFIGS} >= {"multi30k", "wmt14-en-de"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_config_parses(path: Path) -> None:
    resolved = resolve_config(preset=None, config_file=path, overrides=[], flags={})
    assert str(path) in resolved.origins.values()


def test_every_recipe_is_in_the_index() -> None:
    index = (RECIPES / "README.md").read_text(encoding="utf-8")
    names = {path.parent.name for path in RECIPES.glob("*/README.md")}
    assert names >= {"multi30k", "wmt14-en-de"}
    assert [name for name in sorted(names) if f"]({name}/)" not in index] == []
