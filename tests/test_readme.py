"""What the README tells a new user to type works as it stands there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.cli.train import resolve_config
from tests.helpers import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.split("\n") if line.strip()
]


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_knows_what_the_readme_names(target: str) -> None:
    make = shutil.which("make")
    assert make is not None
    steps = subprocess.run([make, "-n", target], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert {"demo": "quickstart", "test": "pytest"}[target] in steps


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {target for text in re.findall(r"`make ([a-z -]+)`", README) for target in text.split()}
    assert named
    assert named <= targets


def test_every_command_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`mtkit ([a-z]+)", README))
    assert {"train", "translate", "score"} <= named
    for command in sorted(named):
        done = subprocess.run([sys.executable, "-m", "mtkit", command, "--help"], capture_output=True, check=False)
        assert done.returncode == 0, command


def test_training_translating_and_scoring_as_the_readme_says(tmp_path: Path) -> None:
    """The commands are taken from the README word for word; only the vocabulary and the length of the training are cut down."""
    words = [f"{left}{right}" for left in "bdfgkl" for right in ("a", "e", "in", "or")]
    lines = [" ".join(words[(index * step + step) % len(words)] for step in range(1, 2 + index % 7)) for index in range(150)]
    for name, part in (("train", lines[:120]), ("dev", lines[120:135]), ("test", lines[135:])):
        (tmp_path / f"{name}.en").write_text("".join(f"{line}\n" for line in part))
        (tmp_path / f"{name}.de").write_text("".join(f"{line[::-1]}\n" for line in part))
    train, translate, score = (next(line for line in COMMANDS if line.startswith(f"mtkit {name}")) for name in ("train", "translate", "score"))
    shorter = " --set tokenizer.vocab_size=320 --set training.max_steps=3 --set model.d_model=16 --set validation.metric=loss --threads 1"
    shorter += " --set validation.translate=false"
    for command in (train + shorter, translate, score):
        done = subprocess.run(
            ["/bin/sh", "-c", command.replace("mtkit", f"{sys.executable} -m mtkit", 1)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "hyp.de").read_text().count("\n") == 15
    (script,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"(.*-?\d+\.\d+\n){2}", done.stdout)


def test_the_config_in_the_readme_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "config.toml").write_text(block)
        resolved = resolve_config(preset=None, config_file=tmp_path / "config.toml", overrides=[], flags={})
        assert "preset base" in resolved.origins.values()


def test_the_tour_of_the_code_names_every_module() -> None:
    tour = (REPOSITORY / "mtkit" / "README.md").read_text(encoding="utf-8")
    places = [path for path in (REPOSITORY / "mtkit").rglob("*.py") if path.parent.name not in ("cli", "benchmark") and "__" not in path.name]
    assert len(places) > 40
    assert [path.name for path in places if f"`{path.name}`" not in tour] == []
