"""What the recipe tests share: a way to run a recipe's Makefile, a toy corpus, and a config that trains on it in seconds."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

RunMake = Callable[..., subprocess.CompletedProcess[str]]
ToyPairs = Callable[[int, int], list[tuple[str, str]]]

_SUBJECTS = {"The old man": "Der alte Mann", "A young woman": "Eine junge Frau", "My brother": "Mein Bruder", "The teacher": "Die Lehrerin"}
_VERBS = {"sees": "sieht", "buys": "kauft", "paints": "malt", "loses": "verliert", "finds": "findet", "carries": "trägt"}
_COLOURS = {"red": "roten", "green": "grünen", "small": "kleinen", "wooden": "hölzernen", "heavy": "schweren"}
_OBJECTS = {"table": "Tisch", "hat": "Hut", "dog": "Hund", "ball": "Ball", "suitcase": "Koffer", "umbrella": "Regenschirm"}
_PLACES = {"in the park": "im Park", "at the station": "am Bahnhof", "behind the house": "hinter dem Haus", "near the river": "am Fluss"}

TOY_CONFIG = """
[tokenizer]
vocab_size = 110
byte_fallback = false

[preprocess.filters]
max_length = 60

[model]
d_model = 64
ffn_dim = 128
num_heads = 2
dropout = 0.0
num_encoder_layers = 1
num_decoder_layers = 1

[optim]
lr = 5e-3
warmup_steps = 40

[batch]
batch_tokens = 1024
max_tokens = 1024

[training]
max_steps = 200
precision = "fp32"

[validation]
every_steps = 200
metric = "loss"
translate = false

[checkpoint]
every_steps = 100
every_minutes = "none"
keep_last = 3
"""


@pytest.fixture
def run_make() -> RunMake:
    """Runs `make` in a recipe's directory with this Python and its mtkit; extra variables come as keywords, the output as text."""

    def run(recipe: str, *goals: str, check: bool = True, **variables: str | Path) -> subprocess.CompletedProcess[str]:
        # The tests themselves may run below a make, whose flags and variables must not reach this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environment |= {"OMP_NUM_THREADS": "1", "MTKIT": f"{sys.executable} -m mtkit", "PYTHON": sys.executable}
        settings = [f"{name}={value}" for name, value in variables.items()]
        command = ["make", "--no-print-directory", "-C", str(REPOSITORY / "recipes" / recipe), *goals, *settings]
        done = subprocess.run(command, check=False, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=280)
        if check and done.returncode:
            pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    return run


@pytest.fixture
def toy_pairs() -> ToyPairs:
    """Makes English-German pairs: how many, and a seed."""

    def make(count: int, seed: int) -> list[tuple[str, str]]:
        rng = random.Random(seed)
        pairs = []
        for _ in range(count):
            parts = [rng.choice(list(words.items())) for words in (_SUBJECTS, _VERBS, _COLOURS, _OBJECTS, _PLACES)]
            (subject, verb, colour, thing, place), (betreff, verb_de, farbe, ding, ort) = zip(*parts, strict=True)
            number = rng.randrange(2, 100)
            source = f"{subject} {verb} the {colour} {thing} {place}, number {number}."
            target = f"{betreff} {verb_de} den {farbe} {ding} {ort}, Nummer {number}."
            pairs.append((source, target))
        return pairs

    return make


@pytest.fixture
def toy_config(tmp_path: Path) -> Path:
    """A config file for a model that trains on the toy corpus in a second or two."""
    path = tmp_path / "config.toml"
    path.write_text(TOY_CONFIG, encoding="utf-8")
    return path
