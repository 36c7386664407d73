import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.config import read_config
from tests.helpers import REPOSITORY, shared_data

RECIPE = REPOSITORY / "recipes" / "multi30k"
TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")

RunMake = Callable[..., subprocess.CompletedProcess[str]]
ToyPairs = Callable[[int, int], list[tuple[str, str]]]


def tokenize(text: bytes, language: str = "de") -> bytes:
    command = [sys.executable, str(RECIPE / "tokenize_lc.py"), language]
    return subprocess.run(command, input=text, check=True, capture_output=True, timeout=60).stdout


def write_toy_data(directory: Path, toy_pairs: ToyPairs) -> None:
    directory.mkdir()
    for seed, (name, count) in enumerate({"train": 400, "val": 20, **dict.fromkeys(TESTS, 12)}.items()):
        pairs = toy_pairs(count, seed)
        for side, language in enumerate(("en", "de")):
            (directory / f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
        if name in TESTS:
            (directory / f"{name}.lc.norm.tok.de").write_bytes(tokenize((directory / f"{name}.de").read_bytes()))


# --- the Moses form -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize("name", TESTS)
def test_moses_form_of_the_raw_text_is_the_distributed_one(name: str, language: str) -> None:
    data = shared_data("multi30k")
    assert tokenize((data / f"{name}.{language}").read_bytes(), language) == (data / f"{name}.lc.norm.tok.{language}").read_bytes()


def test_moses_form_splits_normalizes_and_lowers() -> None:
    text = "Ein Boston Terrier läuft über saftig-grünes Gras.\nEr sagt: „Der Hund & ich“\n"
    expected = "ein boston terrier läuft über saftig-grünes gras .\ner sagt : &quot; der hund &amp; ich &quot;\n"
    assert tokenize(text.encode()).decode() == expected
    assert tokenize("The dog's Café.\n".encode(), "en").decode() == "the dog &apos;s café .\n"


def test_moses_form_has_one_line_per_line() -> None:
    lines = ["a\u2028b", "", " ", "c\u0085d\x0be\x0cf\x1cg", "\ufeffh", "\xa0", "ende"]
    result = tokenize("\n".join(lines).encode()).decode()
    assert result.count("\n") == len(lines)
    assert len(result.splitlines()) == len(lines)
    assert tokenize(b"caf\xe9\nx") == "caf \ufffd\nx\n".encode()


# --- the Makefile ---------------------------------------------------------------------------------------------------------------------


def test_dry_run_shows_the_steps_in_order(run_make: RunMake, tmp_path: Path, toy_pairs: ToyPairs) -> None:
    write_toy_data(tmp_path / "data", toy_pairs)
    shown = run_make("multi30k", "-n", "results", DATA=tmp_path / "data", OUT=tmp_path / "out", SEED="7").stdout
    steps = re.findall(r"mtkit (tokenizer train|preprocess|train|average|translate|score)\b", shown)
    assert list(dict.fromkeys(steps)) == ["tokenizer train", "preprocess", "train", "average", "translate", "score"]
    assert steps.count("translate") == 3
    assert steps.count("score") == 6
    assert f"--seed 7  --output {tmp_path}/out/seed-7" in shown
    assert "--last 10" in shown
    assert shown.count("--beam-size 5 ") == 3
    assert "fetch.py" not in shown
    assert not (tmp_path / "out").exists()


def test_lower_cased_text_goes_through_all_steps(run_make: RunMake, tmp_path: Path, toy_pairs: ToyPairs) -> None:
    write_toy_data(tmp_path / "data", toy_pairs)
    out = tmp_path / "out"
    shown = run_make("multi30k", "-n", "results", DATA=tmp_path / "data", OUT=out, TEXT="lc").stdout
    made = re.findall(r"tokenize_lc\.py (en|de) \S+ \S+/out/lc/text/(\S+)", shown)
    assert made == [(name[-2:], name) for name in ("train.en", "train.de", "val.en", "val.de", *(f"{test}.en" for test in TESTS))]
    assert f"mtkit preprocess --train {out}/lc/text/train.en {out}/lc/text/train.de --dev {out}/lc/text/val.en" in shown
    assert shown.count(f"--config {RECIPE}/config-lc.toml") == 3
    translated = re.findall(r"mtkit translate .* --input (\S+) --output (\S+)", shown)
    assert translated == [(f"{out}/lc/text/{test}.en", f"{out}/lc/seed-1/{test}.lc.norm.tok") for test in TESTS]
    scored = re.findall(r"mtkit score --json --metrics bleu --tokenize none --ref (\S+) (\S+) >", shown)
    assert scored == [(f"{tmp_path}/data/{test}.lc.norm.tok.de", hypothesis) for test, (_, hypothesis) in zip(TESTS, translated, strict=True)]
    assert ".cased.json" not in shown
    wrong = run_make("multi30k", "-n", "results", check=False, DATA=tmp_path / "data", OUT=out, TEXT="lower")
    assert "TEXT is raw or lc, not lower" in wrong.stderr


def test_steps_whose_product_exists_are_skipped(run_make: RunMake, tmp_path: Path, toy_pairs: ToyPairs) -> None:
    write_toy_data(tmp_path / "data", toy_pairs)
    out = tmp_path / "out"
    for artefact in ("tokenizer", "shards", "seed-1/model"):
        (out / artefact).mkdir(parents=True)
        (out / artefact / "MANIFEST.json").touch()
    shown = run_make("multi30k", "-n", "results", DATA=tmp_path / "data", OUT=out).stdout
    assert re.findall(r"mtkit (\w+)", shown)[:2] == ["average", "translate"]
    shown = run_make("multi30k", "-n", "results", DATA=tmp_path / "data", OUT=out, SEED="2").stdout
    assert re.findall(r"mtkit (\w+)", shown)[:2] == ["train", "average"]


def test_a_run_is_not_shown_for_other_settings(run_make: RunMake, tmp_path: Path) -> None:
    for side in ("en", "de"):
        for name in ("train", "val"):
            (tmp_path / f"{name}.{side}").touch()
    steps = run_make("multi30k", "-n", "train", DATA=tmp_path, OUT=tmp_path / "out").stdout
    assert re.search(r"printf .* > \S+/out/seed-1/settings", steps)
    run = tmp_path / "out" / "seed-1"
    for place in (tmp_path / "out" / "shards", run / "model"):
        place.mkdir(parents=True)
        (place / "MANIFEST.json").touch()
    config = RECIPE / "config.toml"
    (run / "settings").write_text(f"{config}  --set seed=3, the last 10 checkpoints\n", encoding="utf-8")
    run_make("multi30k", "train", DATA=tmp_path, OUT=tmp_path / "out", TRAIN_FLAGS="--set seed=3")
    for other in ({"TRAIN_FLAGS": "--set seed=4"}, {"TRAIN_FLAGS": "--set seed=3", "AVERAGE": "5"}, {}):
        done = run_make("multi30k", "train", check=False, DATA=tmp_path, OUT=tmp_path / "out", **other)
        assert done.returncode != 0
        assert f"{run} was made with other settings: {config}  --set seed=3, the last 10 checkpoints" in done.stderr


@pytest.mark.parametrize("recipe", ["multi30k", "wmt14-en-de", "quickstart"])
def test_a_path_with_spaces_is_refused_in_words(run_make: RunMake, tmp_path: Path, recipe: str) -> None:
    done = run_make(recipe, "-n", "results" if recipe != "wmt14-en-de" else "base", check=False, OUT=tmp_path / "a b")
    assert done.returncode != 0
    assert "make cannot work with spaces in paths" in done.stderr


def test_without_a_directory_the_files_are_downloaded(run_make: RunMake, tmp_path: Path) -> None:
    shown = run_make("multi30k", "-n", "data", OUT=tmp_path / "out").stdout
    fetched = re.findall(r"fetch\.py --sums \S+ https://\S+/task1/(\S+) (\S+)", shown)
    assert len(fetched) == 13
    assert dict(fetched)["raw/train.en.gz"] == f"{tmp_path}/out/data/train.en"
    assert dict(fetched)["tok/test_2016_flickr.lc.norm.tok.de"] == f"{tmp_path}/out/data/test_2016_flickr.lc.norm.tok.de"
    listed = {line.split("  ")[1] for line in (RECIPE / "SHA256SUMS").read_text(encoding="utf-8").strip().split("\n")}
    assert {Path(path).name for _, path in fetched} == listed


def test_a_missing_file_of_a_given_directory_is_named(run_make: RunMake, tmp_path: Path) -> None:
    done = run_make("multi30k", "-n", "results", check=False, DATA=tmp_path / "nothing", OUT=tmp_path / "out")
    assert done.returncode != 0
    assert f"{tmp_path}/nothing/train.en" in done.stderr


def test_sums_are_those_of_the_data() -> None:
    data = shared_data("multi30k")
    for line in (RECIPE / "SHA256SUMS").read_text(encoding="utf-8").strip().split("\n"):
        digest, name = line.split("  ")
        assert hashlib.sha256((data / name).read_bytes()).hexdigest() == digest, name


def test_config_serves_all_commands() -> None:
    # `mtkit tokenizer train` and `mtkit preprocess` read their table of the same file.
    for name in ("config.toml", "config-lc.toml"):
        assert {"tokenizer", "preprocess"} <= set(read_config(RECIPE / name))


# --- the table ------------------------------------------------------------------------------------------------------------------------


def test_table_of_results(tmp_path: Path) -> None:
    for number, name in enumerate(TESTS):
        for kind, score in (("cased", 30.0 + number), ("lctok", 40.0 + number)):
            chrf = {"metric": "chrf", "score": 99.0}
            entry = {"metric": "bleu", "score": score, "low": score - 1, "high": score + 1.5, "signature": f"{kind}-signature"}
            document = {"systems": [{"name": "x", "scores": [chrf, entry]}]}
            (tmp_path / f"{name}.{kind}.json").write_text(json.dumps(document), encoding="utf-8")
    command = [sys.executable, str(RECIPE / "results.py"), str(tmp_path), *TESTS]
    rows = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")
    assert re.split(r"  +", rows[1]) == ["test_2016_flickr", "30.00 [29.00, 31.50]", "40.00 [39.00, 41.50]", "41.02"]
    assert re.split(r"  +", rows[3])[0] == "test_2017_mscoco"
    assert any("cased sacreBLEU" in row and "cased-signature" in row for row in rows)
    assert any("lower-cased tokenized BLEU" in row and "lctok-signature" in row for row in rows)
    for name in TESTS:
        (tmp_path / f"{name}.cased.json").unlink()
    rows = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split("\n")
    assert re.split(r"  +", rows[1]) == ["test_2016_flickr", "-", "40.00 [39.00, 41.50]", "41.02"]
    assert not any("raw references" in row for row in rows)


# --- the study ------------------------------------------------------------------------------------------------------------------------


def test_means_over_seeds_are_what_the_study_prints(tmp_path: Path) -> None:
    for seed, score in ((1, 30.0), (2, 33.0)):
        run = tmp_path / "wide" / f"seed-{seed}"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"kind": "train"}\n{"kind": "end", "elapsed_s": 90.0}\n', encoding="utf-8")
        for name in TESTS:
            for kind in ("cased", "lctok"):
                document = {"systems": [{"name": "x", "scores": [{"metric": "bleu", "score": score + (kind == "lctok")}]}]}
                (run / f"{name}.{kind}.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "wide" / "seed-3").mkdir()  # not finished
    command = [sys.executable, "-m", "recipes.multi30k.study", str(tmp_path), "wide", "deep"]
    rows = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=REPOSITORY).stdout.split("\n")
    mean = ", ".join(["32.50 (±1.50)"] * 3)
    assert rows[2] == f"| wide | 2 | 1.5 | {mean} | {mean.replace('32.50', '31.50')} |"
    assert rows[3] == "| deep | 0 | - | - | - |"
    for path in tmp_path.glob("wide/*/*.cased.json"):
        path.unlink()
    rows = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=REPOSITORY).stdout.split("\n")
    assert rows[2] == f"| wide | 2 | 1.5 | {mean} | - |"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_study_trains_every_variant_with_every_seed(tmp_path: Path, toy_pairs: ToyPairs, toy_config: Path) -> None:
    write_toy_data(tmp_path / "data", toy_pairs)
    variants = tmp_path / "variants.txt"
    variants.write_text("# a comment\nplain 110 --set optim.lr=4e-3  # the rest by default\n\nbad 90 --set no.such=1\n", encoding="utf-8")
    environment = {
        **os.environ,
        "SEEDS": "1 2",
        "JOBS": "2",
        "STEPS": "200",
        "AVERAGE": "2",
        "CONFIG": str(toy_config),
        "MTKIT": f"{sys.executable} -m mtkit",
    }
    environment |= {"PYTHON": sys.executable, "TRAIN_FLAGS": "--threads 1 --set validation.every_steps=none"}
    command = ["bash", str(RECIPE / "study.sh"), str(tmp_path / "data"), str(tmp_path / "out"), str(variants)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1, "one variant failed"
    assert re.findall(r"^\| (\w+) \| (\d) \| \d", done.stdout, flags=re.MULTILINE) == [("plain", "2")]
    assert "bad, seed 2: failed, see " in done.stderr
    assert "unknown key no" in (tmp_path / "out" / "raw-200" / "bad-2.log").read_text(encoding="utf-8")
    config = json.loads((tmp_path / "out" / "raw-200" / "plain" / "seed-2" / "config.json").read_text(encoding="utf-8"))
    assert (config["seed"], config["optim"]["lr"], config["training"]["max_steps"], config["checkpoint"]["every_steps"]) == (2, 4e-3, 200, 4)
    again = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=environment)
    assert again.stdout == done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "hypotheses", "cased"), [("raw", "seed-1/{}.de", r"(\d+\.\d\d) \[[\d., ]+\]"), ("lc", "lc/seed-1/{}.lc.norm.tok", "(-)")]
)
def test_the_whole_recipe_runs_and_then_has_nothing_to_do(
    run_make: RunMake, tmp_path: Path, toy_pairs: ToyPairs, toy_config: Path, text: str, hypotheses: str, cased: str
) -> None:
    write_toy_data(tmp_path / "data", toy_pairs)
    out = tmp_path / "out"
    settings = {"DATA": tmp_path / "data", "OUT": out, "CONFIG": toy_config, "AVERAGE": "2", "TEXT": text}
    table = run_make("multi30k", "results", **settings).stdout
    for name in TESTS:
        assert len((out / hypotheses.format(name)).read_bytes().split(b"\n")) == 13
        row = re.search(rf"^{name} +{cased} +(\d+\.\d\d) \[[\d., ]+\] +\d+\.\d\d$", table, re.MULTILINE)
        assert row is not None, table
        assert float(row[2]) > 30  # the toy language is learnt
        assert text == "lc" or float(row[1]) > 30
    assert ("case:mixed|eff:no|tok:13a" in table) == (text == "raw")
    assert "case:mixed|eff:no|tok:none" in table
    again = run_make("multi30k", "results", **settings)
    assert "mtkit" not in again.stdout
    assert "target tokens" not in again.stderr
