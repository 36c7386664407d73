import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mtkit.cli.train import resolve_config
from mtkit.config import read_config
from mtkit.data.batching import derive_budget
from tests.helpers import REPOSITORY

RECIPE = REPOSITORY / "recipes" / "wmt14-en-de"

RunMake = Callable[..., subprocess.CompletedProcess[str]]
ToyPairs = Callable[[int, int], list[tuple[str, str]]]
Pairs = Sequence[tuple[str, str]]


def run_script(name: str, *args: str, text: bytes = b"") -> bytes:
    return subprocess.run([sys.executable, str(RECIPE / name), *args], input=text, check=True, capture_output=True, timeout=60).stdout


def write_parquet(path: Path, pairs: Pairs) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pydict({"translation": [{"de": target, "en": source} for source, target in pairs]}), path)


def write_json_lines(path: Path, pairs: Pairs) -> None:
    records = [json.dumps({"translation": {"de": target, "en": source}}, ensure_ascii=False) for source, target in pairs]
    path.write_text("".join(f"{record}\n" for record in records), encoding="utf-8")


# --- the paper's metric ---------------------------------------------------------------------------------------------------------------


def test_compounds_are_split_as_in_the_papers_scores() -> None:
    text = "Der COVID-19-Fall: „Rich-Text“ – nicht – ok.\nU-Bahn\n - \n"
    expected = (
        'Der COVID ##AT##-##AT## 19 ##AT##-##AT## Fall : „ Rich ##AT##-##AT## Text " – nicht – ok .\n'
        "U ##AT##-##AT## Bahn\n"
        "-\n"  # a dash between spaces is no compound
    )
    assert run_script("split_compounds.py", text=text.encode()).decode() == expected


def test_split_form_has_one_line_per_line(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes("a\u2028b\n\n\x0b\nc\u0085d".encode())
    run_script("split_compounds.py", str(source), str(tmp_path / "out"))
    assert len((tmp_path / "out").read_text(encoding="utf-8").splitlines()) == 4


# --- the corpus -----------------------------------------------------------------------------------------------------------------------


def test_lines_of_both_sides(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [("one", "eins"), ("two\nlines", "")])
    write_json_lines(tmp_path / "b.jsonl", [("three", "drei")])
    assert run_script("lines.py", str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")) == b"one\neins\ntwo lines\n\nthree\ndrei\n"


def test_a_missing_corpus_is_an_error_not_an_empty_text(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE / "lines.py"), str(tmp_path / "nothing.jsonl")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "nothing.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


# --- the configs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["base", "big"])
def test_an_update_is_25000_target_tokens_on_1_4_and_8_gpus(model: str) -> None:
    batch = resolve_config(preset=None, config_file=RECIPE / f"config-{model}.toml", overrides=[], flags={}).config.batch
    for num_gpus in (1, 4, 8):
        budget = derive_budget(batch_tokens=batch.batch_tokens, max_tokens=batch.max_tokens, world_size=num_gpus)
        assert budget.micro_per_update * budget.tgt_tokens == 25_000
        assert budget.micro_per_update % num_gpus == 0
        assert budget.max_tokens >= 1.3 * budget.tgt_tokens  # else long sources, not target tokens, would set the size


@pytest.mark.parametrize(("model", "last", "steps"), [("base", 5, 100_000), ("big", 20, 300_000)])
def test_the_checkpoints_to_average_are_kept_and_evenly_spaced(model: str, last: int, steps: int) -> None:
    config = resolve_config(preset=None, config_file=RECIPE / f"config-{model}.toml", overrides=[], flags={}).config
    assert config.checkpoint.keep_last >= last
    assert config.training.max_steps == steps
    every = config.checkpoint.every_steps
    assert every is not None
    assert config.checkpoint.every_minutes is None
    assert config.validation.every_steps is not None
    assert steps % every == 0  # the last checkpoint
    assert config.validation.every_steps % every == 0  # a validation saves a checkpoint too


def test_data_config_serves_tokenizer_and_preprocess() -> None:
    assert set(read_config(RECIPE / "config-data.toml")) == {"tokenizer", "preprocess"}


# --- the Makefile ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "last"), [("base", "5"), ("big", "20")])
def test_dry_run_shows_the_steps_in_order(run_make: RunMake, tmp_path: Path, model: str, last: str) -> None:
    shown = run_make("wmt14-en-de", "-n", model, OUT=tmp_path / "out", GPUS="8", SEED="3").stdout
    steps = re.findall(r"(fetch\.py|mtkit (?:tokenizer train|preprocess|train|average|translate|score))\b", shown)
    assert list(dict.fromkeys(steps)) == [
        "fetch.py",
        *(f"mtkit {step}" for step in ("tokenizer train", "preprocess", "train", "average", "translate", "score")),
    ]
    assert steps.count("fetch.py") == 5
    assert len(re.findall(r"https://huggingface\.co/datasets/wmt/wmt14/resolve/[0-9a-f]{40}/de-en/\S+\.parquet", shown)) == 5
    assert f"config-{model}.toml --seed 3 --nproc 8" in shown
    assert f"--last {last} " in shown
    assert "--beam-size 4 --length-penalty 0.6" in shown
    assert "--test-set wmt14/full --lang-pair en-de" in shown
    assert not (tmp_path / "out").exists()


def test_every_downloaded_file_has_a_sum(run_make: RunMake, tmp_path: Path) -> None:
    shown = run_make("wmt14-en-de", "-n", "data", OUT=tmp_path / "out").stdout
    lines = (RECIPE / "SHA256SUMS").read_text(encoding="utf-8").strip().split("\n")
    assert all(re.fullmatch(r"[0-9a-f]{64}  \S+", line) for line in lines)
    assert {Path(path).name for path in re.findall(r"\S+/out/data/\S+\.parquet", shown)} == {line.split("  ")[1] for line in lines}


def test_both_models_share_tokenizer_and_shards(run_make: RunMake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for artefact in ("tokenizer", "shards", "base-seed1/model"):
        (out / artefact).mkdir(parents=True)
        (out / artefact / "MANIFEST.json").touch()
    shown = run_make("wmt14-en-de", "-n", "base", OUT=out).stdout
    assert re.findall(r"mtkit (\w+)", shown)[:2] == ["average", "translate"]
    shown = run_make("wmt14-en-de", "-n", "big", OUT=out, MAX_TOKENS="4096").stdout
    assert re.findall(r"mtkit (\w+)", shown)[:2] == ["train", "average"]
    assert "--set batch.max_tokens=4096" in shown


@pytest.mark.slow
def test_the_whole_recipe_runs_on_a_stand_in(run_make: RunMake, tmp_path: Path, toy_pairs: ToyPairs, toy_config: Path) -> None:
    pairs = toy_pairs(400, 1)
    write_parquet(tmp_path / "a.parquet", pairs[:250])
    write_parquet(tmp_path / "b.parquet", [*pairs[250:], pairs[0], ("", "leer")])
    write_parquet(tmp_path / "dev.parquet", toy_pairs(20, 2))
    test = toy_pairs(15, 3)
    write_json_lines(tmp_path / "test.jsonl", test)
    out = tmp_path / "out"
    settings = {
        "CORPUS": f"{tmp_path}/a.parquet {tmp_path}/b.parquet",
        "DEV": tmp_path / "dev.parquet",
        "TEST": tmp_path / "test.jsonl",
        "TEST_SET": "",
        "DATA_CONFIG": toy_config,
        "CONFIG": toy_config,
        "AVERAGE": "2",
        "GPUS": "2",
        "TRAIN_FLAGS": "--device cpu",
        "OUT": out,
    }
    shown = run_make("wmt14-en-de", "base", **settings).stdout
    run = out / "base-seed1"
    assert json.loads((run / "average" / "MANIFEST.json").read_text(encoding="utf-8"))["kind"] == "model"
    assert (out / "shards" / "held_out" / "newstest2014.tgt").read_text(encoding="utf-8") == "".join(f"{target}\n" for _, target in test)
    assert (run / "newstest2014.de").read_bytes().count(b"\n") == len(test)
    scores = (run / "scores.txt").read_text(encoding="utf-8")
    assert scores in shown
    for name, tokenizer in (("cased sacreBLEU", "13a"), ("tokenized BLEU with split compounds", "none")):
        found = re.search(rf"^{name}, .*:\nBLEU (\d+\.\d+) .*case:mixed\|eff:no\|tok:{tokenizer}\|", scores, re.MULTILINE)
        assert found is not None, scores
        assert float(found[1]) > 30  # the toy language is learnt
    assert "wmt14/full" not in scores
    again = run_make("wmt14-en-de", "base", **settings)
    assert again.stdout == scores
