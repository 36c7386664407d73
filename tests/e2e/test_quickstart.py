"""The quickstart recipe from end to end, as `make demo` runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.evaluation.metrics import corpus_scores
from mtkit.files import read_lines
from tests.e2e.toy import mtkit_environment
from tests.helpers import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_learns_its_language(tmp_path: Path) -> None:
    """From a checkout, in any other directory: BLEU on sentences that were not in training."""
    made = subprocess.run(
        ["make", "-f", "recipes/quickstart/Makefile", "results", f"OUT={tmp_path}", f"MTKIT={sys.executable} -m mtkit", f"PYTHON={sys.executable}"],
        cwd=REPOSITORY,
        env=mtkit_environment(),
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr.decode()
    ref = read_lines(tmp_path / "data" / "test.de")
    score = corpus_scores(read_lines(tmp_path / "test.de"), [ref], metrics=("bleu",))[0]
    assert score.value >= 90
    assert f"BLEU {score.value:.2f}" in made.stdout.decode(), "the number that it prints is the number"
    assert not set(read_lines(tmp_path / "data" / "test.en")) & set(read_lines(tmp_path / "data" / "train.en"))
