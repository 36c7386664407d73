import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from mtkit import config as codec
from mtkit.checkpoint.format import load_model, parameters_by_name
from mtkit.cli.app import app
from mtkit.training.config import TrainConfig
from mtkit.training.progress import read_metrics

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def mtkit(*words: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == exit_code, result.output
    return result


def start(words: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "mtkit", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, **options)


# --- the config -------------------------------------------------------------------------------------------------------------------------


def printed(*words: object) -> tuple[dict[str, Any], dict[str, str]]:
    """The values and the origins that `--print-config` prints, by dotted key."""
    text = mtkit("train", "--print-config", *words).stdout
    origins, table = {}, ""
    for line in text.split("\n"):
        if match := re.fullmatch(r"\[(.+)\]", line):
            table = f"{match[1]}."
        elif match := re.fullmatch(r"(?:# )?(\w+) = .* # (.+)", line):
            origins[table + match[1]] = match[2]
    values = tomllib.loads(text)
    codec.from_dict(TrainConfig, values)
    return values, origins


def test_flags_win_over_set_over_the_file_over_the_preset_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('preset = "small"\nseed = 3\n[optim]\nlr = 0.5\nwarmup_steps = 77\n[data]\nsrc_lang = "cs"\ntgt_lang = "sk"\n')
    values, origins = printed(
        "--config",
        file,
        "--preset",
        "tiny",
        "--set",
        "optim.lr=0.25",
        "--set",
        "seed=4",
        "--set",
        "data.src_lang=pl",
        "--seed",
        "5",
        "--src-lang",
        "en",
    )
    assert (values["seed"], origins["seed"]) == (5, "command line")
    assert (values["data"]["src_lang"], origins["data.src_lang"]) == ("en", "command line")
    assert (values["optim"]["lr"], origins["optim.lr"]) == (0.25, "--set")
    assert (values["data"]["tgt_lang"], origins["data.tgt_lang"]) == ("sk", str(file))
    assert (values["optim"]["warmup_steps"], origins["optim.warmup_steps"]) == (77, str(file))
    assert (values["model"]["d_model"], origins["model.d_model"]) == (128, "preset tiny")
    assert (values["optim"]["beta2"], origins["optim.beta2"]) == (0.98, "default")
    values, origins = printed("--config", file)
    assert (values["model"]["d_model"], origins["model.d_model"]) == (256, "preset small")
    assert set(origins) == set(flat(values)) | {key for key in origins if key not in flat(values)}
    assert len(origins) == sum(1 for _ in flat(codec.to_dict(TrainConfig()))), "each key has its origin"


def flat(tree: dict[str, Any], prefix: str = "") -> list[str]:
    return [key for name, value in tree.items() for key in (flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"])]


def test_a_printed_config_is_a_config_file(tmp_path: Path) -> None:
    first = mtkit("train", "--print-config", "--preset", "deep", "--set", "training.max_minutes=3", "--train", "a.en", "a.de").stdout
    (tmp_path / "again.toml").write_text(first)
    values, _ = printed("--config", tmp_path / "again.toml")
    assert values == tomllib.loads(first)
    assert values["data"]["train"] == ["a.en", "a.de"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "optim.warmup_step=5"], "--set: unknown key optim.warmup_step\nDid you mean optim.warmup_steps?"),
        (["--set", "training.max_steps=many"], "training.max_steps (--set) must be a whole number or none, but is 'many'"),
        (["--set", "seed"], "'seed' is not of the form key=value"),
        (["--preset", "tinny"], "there is no preset 'tinny'\nPresets: tiny, small, base, big, deep"),
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--shards", "s", "--train", "a.en", "a.de"], "data.shards (command line) and train exclude each other"),
        (["--set", "tokenizer.joint=false"], "model.tie_embeddings = three-way needs one vocabulary"),
        ([], "no output directory was given\nAdd --output runs/NAME"),
        (["--output", "OUT"], "no training data was given"),
        (["--output", "OUT", "--train", "a.en", "a.de"], "no dev set was given"),
        (["--output", "OUT", "--stream", "--train", "-", "--dev", "d.en", "d.de"], "a stream needs a tokenizer"),
        (
            ["--output", "OUT", "--stream", "--tokenizer", "t", "--train", "-", "--dev", "d.en", "d.de", "--nproc", "2"],
            "stdin: is a pipe, which one process only can read",
        ),
        (["--output", "OUT", "--train", "-", "--dev", "DEV", "DEV"], "--stream --tokenizer DIR"),
        (["--shards", "s", "--stream"], "data.shards (command line) and stream or tokenizer exclude each other"),
        (["--output", "OUT", "--device", "gpu"], "device must be auto, cpu, cuda or cuda:N, but is 'gpu'"),
        (["--output", "OUT", "--set", "training.precision=fp16", "--device", "cpu"], "precision fp16 needs a GPU"),
        (["--train"], "--train needs a corpus after it"),
        (["--nproc", "0"], "Invalid value for '--nproc'"),
    ],
)
def test_mistakes_end_with_2_and_a_word(words: list[str], message: str, tmp_path: Path, toy_text: Path) -> None:
    places = {"OUT": str(tmp_path / "run"), "DEV": str(toy_text / "dev.en")}
    result = mtkit("train", *[places.get(word, word) for word in words], exit_code=2)
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


# --- a run ------------------------------------------------------------------------------------------------------------------------------


def test_one_command_makes_a_model_of_text(toy_run: Path, toy_text: Path, tmp_path: Path) -> None:
    assert {path.name for path in toy_run.iterdir()} == {"checkpoints", "config.json", "data", "metrics.jsonl", "model"}
    assert [path.name for path in sorted((toy_run / "checkpoints").iterdir())] == ["step-0000004", "step-0000008", "step-0000012"]
    for path in (toy_run, toy_run / "model"):
        mtkit("translate", path, "--input", toy_text / "dev.en", "--output", tmp_path / "out.de", "--quiet")
        assert (tmp_path / "out.de").read_text().count("\n") == 15
    assert load_model(toy_run).description.provenance["config"]["model"]["d_model"] == 16


def test_metrics_are_one_json_object_per_line(toy_run: Path) -> None:
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in (toy_run / "metrics.jsonl").read_text().split("\n")[:-1]]
    assert records == read_metrics(toy_run / "metrics.jsonl")
    kinds = [record["kind"] for record in records]
    assert kinds == ["start", "train", "train", "valid", "train", "valid", "end"]
    assert [record["step"] for record in records] == [0, 4, 8, 8, 12, 12, 12]
    valid = [record for record in records if record["kind"] == "valid"]
    assert all({"loss", "ppl", "bleu", "chrf", "is_best"} <= record.keys() for record in valid)
    stored = json.loads((toy_run / "checkpoints" / "step-0000012" / "state.json").read_text())
    assert stored["scores"] == {name: valid[-1][name] for name in ("loss", "ppl", "bleu", "chrf")}
    assert stored["num_tgt_tokens"] == next(record for record in reversed(records) if record["kind"] == "train")["tgt_tokens"]


def test_the_same_command_again_has_nothing_to_do(toy_run: Path, train_words: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(toy_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = mtkit(*train_words, "--output", run)
    assert "nothing to do: the run is finished at step 12 (training.max_steps = 12 reached)" in result.stderr
    assert result.stdout == ""
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_going_on_and_what_is_refused_then(toy_run: Path, train_words: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(toy_run, tmp_path / "run")
    result = mtkit(*train_words, "--output", run, "--seed", "9", exit_code=2)
    assert f"error: {run}: holds a run with another config: seed: 1 -> 9" in result.stderr
    for processes in (1, 2):
        result = mtkit(*train_words, "--output", run, "--no-resume", "--nproc", processes, exit_code=2)
        assert "holds a run already" in result.stderr
    result = mtkit(*train_words, "--output", run, "--set", "training.max_steps=13", "--json")
    assert f"going on from {run / 'checkpoints' / 'step-0000012'}" in result.stderr
    assert "finished: training.max_steps = 13 reached" in result.stderr
    value = json.loads(result.stdout)
    assert set(value) == {"valid", "end"}
    assert value["valid"]["step"] == value["end"]["step"] == 13
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [0, 4, 8, 8, 12, 12, 12, 13, 13, 13]


def test_quiet_says_nothing(toy_run: Path, train_words: list[str], tmp_path: Path) -> None:
    run = shutil.copytree(toy_run, tmp_path / "run")
    result = mtkit(*train_words, "--output", run, "--set", "training.max_steps=13", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 13


def test_shards_are_an_input_too(toy_run: Path, toy_text: Path, tmp_path: Path) -> None:
    shards = toy_run / "data" / "shards"
    words = ["train", "--shards", shards, "--config", toy_text / "toy.toml", "--device", "cpu", "--set", "training.max_steps=2"]
    mtkit(*words, "--output", tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()
    assert load_model(tmp_path / "run").tokenizer.fingerprint == load_model(toy_run).tokenizer.fingerprint


def test_a_dry_run_reports_and_trains_nothing(train_words: list[str], toy_run: Path, tmp_path: Path) -> None:
    result = mtkit(*train_words, "--output", tmp_path / "run", "--dry-run", "--json", "--quiet")
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert report["parameters"] == load_model(toy_run).model.num_parameters()
    assert report["pairs"] == 120
    assert report["seconds_per_update"] > 0
    assert 50 < report["peak_memory_mb"] < 8000
    for name in ("checkpoints", "model", "metrics.jsonl"):
        assert not (tmp_path / "run" / name).exists()
    text = mtkit(*train_words, "--output", tmp_path / "run", "--dry-run")
    assert text.stdout == ""
    assert re.search(r"^pairs +120$", text.stderr, re.MULTILINE)
    assert re.search(r"^largest_src_shape +\d+ x \d+$", text.stderr, re.MULTILINE)


def test_fine_tuning_begins_with_another_model(toy_run: Path, toy_text: Path, train_words: list[str], tmp_path: Path) -> None:
    values, origins = printed("--init-from", "model", "--keep-optimizer")
    assert (values["training"]["init_from"], values["training"]["keep_optimizer"]) == ("model", True)
    assert origins["training.init_from"] == origins["training.keep_optimizer"] == "command line"
    checkpoint = toy_run / "checkpoints" / "step-0000012"
    short = ("--set", "training.max_steps=1", "--set", "optim.lr=1e-9", "--output", tmp_path / "run")
    result = mtkit(*train_words, *short, "--init-from", checkpoint, "--keep-optimizer")
    assert f"taking the tokenizer of {checkpoint}" in result.stderr
    assert f"beginning with the weights of {checkpoint}" in result.stderr
    tuned, old = (parameters_by_name(load_model(path).model) for path in (tmp_path / "run", checkpoint))
    for name, tensor in old.items():
        torch.testing.assert_close(tuned[name], tensor, rtol=0, atol=1e-6)
    result = mtkit(*train_words, *short, "--init-from", checkpoint, "--fresh-optimizer", exit_code=2)
    assert "training.keep_optimizer: True -> False" in result.stderr
    result = mtkit(*train_words, "--init-from", toy_text, "--output", tmp_path / "other", exit_code=4)
    assert f"error: {toy_text}: holds no model" in result.stderr


def test_the_architecture_is_that_of_the_model_to_begin_with(toy_run: Path, toy_text: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(toy_run / "model", tmp_path / "model"))
    values, origins = printed("--init-from", model, "--preset", "tiny", "--set", "model.dropout=0.2")
    own = json.loads((model / "config.json").read_text())["model"]
    assert values["model"] == {**own, "dropout": 0.2, "attention_dropout": 0.0, "activation_dropout": 0.0}
    assert origins["model.d_model"] == str(model / "config.json")
    assert (values["optim"]["lr"], origins["optim.lr"]) == (5e-3, "preset tiny")
    names = [str(toy_text / name) for name in ("train.en", "train.de", "dev.en", "dev.de")]
    words = ["train", "--train", *names[:2], "--dev", *names[2:], "--preset", "tiny", "--set", "validation.translate=false", "--set"]
    words += ["validation.metric=loss", "--device", "cpu", "--threads", "1", "--init-from", str(model), "--output", str(tmp_path / "run")]
    mtkit(*words, "--set", "training.max_steps=1")
    model.rename(tmp_path / "moved")
    assert "going on from" in mtkit(*words, "--set", "training.max_steps=2").stderr, "the run knows its architecture"
    model.mkdir()
    assert "going on from" in mtkit(*words, "--set", "training.max_steps=3").stderr, "nor is it looked for where something else is"
    refused = mtkit(*words[:-1], tmp_path / "other", "--init-from", tmp_path / "moved", "--set", "model.d_model=32", exit_code=2)
    assert "is another model than that of the config: model.d_model: 16 -> 32" in refused.stderr


# --- a stream ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream_words(toy_run: Path, toy_text: Path) -> list[str]:
    """The words of a run on TSV from stdin, without --output."""
    dev = [str(toy_text / f"dev.{side}") for side in ("en", "de")]
    words = ["train", "--stream", "--train", "-", "--dev", *dev, "--tokenizer", str(toy_run / "model"), "--config", str(toy_text / "toy.toml")]
    return [*words, "--device", "cpu", "--threads", "1"]


def piped(*words: object, data: bytes, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], input=data)
    assert result.exit_code == exit_code, result.output
    return result


def test_tsv_from_stdin_is_trained_on(toy_run: Path, toy_text: Path, stream_words: list[str], tmp_path: Path) -> None:
    sides = [(toy_text / f"train.{side}").read_bytes().split(b"\n")[:-1] for side in ("en", "de")]
    data = b"".join(b"\t".join(pair) + b"\n" for pair in zip(*sides, strict=True))
    result = piped(*stream_words, "--output", tmp_path / "run", data=data)
    assert "a stream of pairs, 9 updates per epoch, " in result.stderr
    assert "step 9  finished: the stream ended" in result.stderr
    assert not (tmp_path / "run" / "data").exists()
    assert load_model(tmp_path / "run").tokenizer.fingerprint == load_model(toy_run).tokenizer.fingerprint
    again = piped(*stream_words, "--output", tmp_path / "run", data=data)
    assert "nothing to do: the run is finished at step 9 (the stream ended)" in again.stderr
    files = [*stream_words[:2], "--train", toy_text / "train.en", toy_text / "train.de", *stream_words[4:]]
    mtkit(*files, "--output", tmp_path / "files", "--set", "training.max_epochs=1")
    models = [parameters_by_name(load_model(tmp_path / name).model) for name in ("run", "files")]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    dry = piped(*stream_words, "--output", tmp_path / "dry", "--dry-run", "--json", data=data)
    assert [json.loads(dry.stdout)[key] for key in ("pairs", "updates_per_epoch")] == [None, 9]
    assert re.search(r"^pairs +unknown$", piped(*stream_words, "--output", tmp_path / "dry", "--dry-run", data=data).stderr, re.MULTILINE)


def test_faults_of_a_stream_are_named(stream_words: list[str], tmp_path: Path) -> None:
    words = [*stream_words, "--output", tmp_path / "run"]
    assert "error: stdin:2: has no tab" in piped(*words, data=b"one\teins\ntwo\n", exit_code=3).stderr
    assert "error: stdin: is empty" in piped(*words, data=b"", exit_code=3).stderr
    assert "none of 2 pairs is left after filtering (empty 2)" in piped(*words, data=b"one\t\n\n", exit_code=3).stderr


@pytest.mark.slow
def test_two_processes_train_on_one_stream(toy_text: Path, stream_words: list[str], tmp_path: Path) -> None:
    files = ["--train", str(toy_text / "train.en"), str(toy_text / "train.de")]
    words = [*stream_words[:2], *files, *stream_words[4:], "--set", "training.max_steps=9", "--set", "batch.max_tokens=60"]
    for name, processes in (("one", "1"), ("two", "2")):
        with start([*words, "--output", str(tmp_path / name), "--nproc", processes]) as process:
            _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert (one[0]["world_size"], two[0]["world_size"]) == (1, 2)
    assert [record["tgt_tokens"] for record in one if record["kind"] == "train"] == [
        record["tgt_tokens"] for record in two if record["kind"] == "train"
    ]
    assert one[-2]["loss"] == pytest.approx(two[-2]["loss"], rel=1e-4)


# --- processes --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_piped_output_is_plain_lines_and_ctrl_c_saves(train_words: list[str], tmp_path: Path) -> None:
    words = [*train_words, "--output", str(tmp_path / "run"), "--set", "training.max_steps=100000", "--workers", "1"]
    with start(words) as process:
        try:
            assert process.stderr is not None
            lines: list[bytes] = []
            while not lines or not lines[-1].startswith(b"step 8  saved"):
                lines.append(process.stderr.readline())
                assert lines[-1], b"".join(lines)
            process.send_signal(2)
            stdout, rest = process.communicate(timeout=60)
        finally:
            process.kill()
    text = b"".join([*lines, rest])
    assert process.returncode == 130, text
    assert b"\x1b" not in text
    assert stdout == b""
    assert b"Run the same command again to go on." in text
    match = re.search(rb"stopped at step (\d+);", text)
    assert match is not None
    assert (tmp_path / "run" / "checkpoints" / f"step-{int(match[1]):07d}").is_dir()


def test_more_processes_than_cores_are_warned_of(train_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.distributed.launch", lambda *_arguments, **_options: 0)
    monkeypatch.setattr("mtkit.cores.num_cores", lambda: 2)
    words = [*train_words, "--output", str(tmp_path / "run"), "--workers", "1", "--device", "cpu"]
    for processes, warnings in ((2, 0), (3, 1)):
        stderr = mtkit(*words, "--nproc", processes).stderr
        assert stderr.count("warning: 3 processes share 2 CPU cores") == stderr.count("warning") == warnings
    words[words.index(str(tmp_path / "run"))] = str(tmp_path / "quiet")
    assert mtkit(*words, "--nproc", 2, "--quiet").stderr == ""


@pytest.mark.slow
def test_two_processes_begin_with_one_model(toy_run: Path, train_words: list[str], tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    words = [*train_words, "--output", str(tuned), "--nproc", "2", "--workers", "1", "--init-from", str(toy_run)]
    with start([*words, "--set", "training.max_steps=1", "--set", "optim.lr=1e-9"]) as process:
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert stderr.decode().count(f"beginning with the weights of {toy_run / 'model'}") == 1
    tensors, old = (parameters_by_name(load_model(path).model) for path in (tuned, toy_run))
    for name, tensor in old.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6)


def test_settings_of_steps_that_are_done_are_told_to_have_no_effect(
    toy_run: Path, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = toy_run / "data" / "shards"
    idle = ["--set", "tokenizer.vocab_size=9999", "--set", "preprocess.filters.max_length=3"]
    words = ["train", "--shards", shards, "--config", toy_text / "toy.toml", "--device", "cpu", "--dry-run"]  # with settings of all steps
    result = mtkit(*words, *idle, "--output", tmp_path / "a")
    assert f"tokenizer.vocab_size has no effect: {shards} is encoded already" in result.stderr
    assert f"preprocess.filters.max_length has no effect: {shards} is encoded already" in result.stderr
    assert result.stderr.count("has no effect") == 2
    monkeypatch.setenv("MTKIT_LAUNCHER", "0")
    monkeypatch.setattr("mtkit.distributed.watch_launcher", lambda: None)
    assert "has no effect" not in mtkit(*words, *idle, "--output", tmp_path / "a").stderr, "the process that launched it has told"
    monkeypatch.delenv("MTKIT_LAUNCHER")
    again = mtkit("train", "--shards", shards, "--shards", tmp_path, "--output", tmp_path / "b", exit_code=2)
    assert "--shards was given 2 times" in again.stderr
