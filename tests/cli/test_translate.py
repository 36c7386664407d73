import gzip
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mtkit.checkpoint.ctranslate2 import export_ctranslate2
from mtkit.checkpoint.format import load_model
from mtkit.cli import translate as command
from mtkit.cli.app import app
from mtkit.decoding.engine.ct2 import load_ctranslate2
from mtkit.decoding.lines import BATCH_TOKENS, SearchConfig
from mtkit.decoding.scoring import score_token_pairs
from mtkit.decoding.translator import Translator
from mtkit.files import decode_line
from tests.decoding.builders import random_model, save, sentences, tiny_tokenizer

Run = Callable[..., Result]
CAP = ("--set", "max_length_constant=5")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "model", random_model(4), tiny_tokenizer())


@pytest.fixture
def run(model_dir: Path) -> Run:
    """Runs `mtkit translate` on the model with these arguments."""

    def invoke(*arguments: str, data: bytes = b"", models: tuple[Path, ...] = (), exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, ["translate", *map(str, models or [model_dir]), *CAP, *arguments], input=data)
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


def start(model_dir: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """The command in a process of its own, in the least capable locale, with buffered output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONUNBUFFERED": ""}
    words = [sys.executable, "-m", "mtkit", "translate", str(model_dir), *CAP, *arguments]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


def text_lines(result: Result) -> list[str]:
    *lines, rest = result.stdout_bytes.decode().split("\n")
    assert rest == ""
    return lines


def library(lines: list[str], **search: Any) -> list[str]:
    translator = Translator([random_model(4)], tiny_tokenizer(), search=SearchConfig(max_length_constant=5, **search))
    return [translation.text for translation in translator.translate(lines)]


# --- lines ------------------------------------------------------------------------------------------------------------------------------


def test_one_line_per_line_in_order_from_stdin_and_files(run: Run, tmp_path: Path) -> None:
    lines = [*sentences(20, seed=3), "", *sentences(3, seed=4)]
    data = "".join(f"{line}\n" for line in lines).encode()
    expected = library(lines)
    result = run(data=data, exit_code=0)
    assert text_lines(result) == expected
    assert "24 lines, " in result.stderr
    (tmp_path / "in.gz").write_bytes(gzip.compress(data))
    quiet = run("--input", str(tmp_path / "in.gz"), "--output", str(tmp_path / "sub" / "out"), "--quiet", "--batch-tokens", "40")
    assert (tmp_path / "sub" / "out").read_bytes() == result.stdout_bytes
    assert quiet.stdout_bytes == b""
    assert "tokens/s" not in quiet.stderr


@pytest.mark.smoke
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.sampled_from([b"a", b"baki ", b"\n", b"\r", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\x0b", b"\x00", b"\x1b"])).map(b"".join)
    | st.binary(max_size=40)
)
def test_any_bytes_give_exactly_one_line_per_line(run: Run, data: bytes) -> None:
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert len(text_lines(run("--beam-size", "1", data=data))) == num_lines
    n_best = text_lines(run("--beam-size", "2", "--n-best", "2", data=data))
    assert [line.split("\t")[:2] for line in n_best] == [[str(line), str(rank)] for line in range(1, num_lines + 1) for rank in (1, 2)]
    assert all(line.count("\t") == 3 for line in n_best)


def test_only_lf_ends_a_line(run: Run) -> None:
    odd = "baki\u2028ki\u0085lo\x0bmu\x0cner\x1cvo"
    data = f"{odd}\nx\ry\nlast\r\n".encode()
    assert text_lines(run(data=data)) == library([odd, "x y", "last"])
    assert "\r" not in run(data=data).stdout


def test_bad_utf8_is_counted_and_the_same_in_a_file_and_in_a_pipe(run: Run, tmp_path: Path) -> None:
    data = b"caf\xe9\nbaki\n\xed\xa0\x80\n"
    (tmp_path / "in").write_bytes(data)
    piped, filed = run(data=data), run("-i", str(tmp_path / "in"))
    assert piped.stdout_bytes == filed.stdout_bytes
    assert text_lines(piped) == library([decode_line(line)[0] for line in (b"caf\xe9", b"baki", b"\xed\xa0\x80")])
    assert "2 lines hold bytes that are not UTF-8" in piped.stderr
    assert "2 lines hold bytes that are not UTF-8" in filed.stderr


def test_long_and_cut_lines_are_named_but_not_too_often(run: Run) -> None:
    data = ("ba\n" + " ".join(["baki"] * 40) + "\nki\n").encode()
    result = run("--set", "max_source_length=10", data=data)
    assert len(text_lines(result)) == 3
    assert "warning: stdin:2: the source has " in result.stderr
    assert "only the first 10 were translated" in result.stderr
    many = run("--set", "max_source_length=1", data=b"baki lo mu\n" * (command.MAX_WARNINGS + 5))
    assert many.stderr.count("warning: stdin:") == command.MAX_WARNINGS
    assert "warning: 5 more lines had a source or a translation that was cut" in many.stderr


# --- n-best and JSON --------------------------------------------------------------------------------------------------------------------


def test_n_best_prints_n_ranked_lines_for_every_line(run: Run) -> None:
    rows = [line.split("\t") for line in text_lines(run("--beam-size", "5", "--n-best", "3", data=b"baki lo\n\nmu\n"))]
    assert [row[:2] for row in rows] == [[line, rank] for line in "123" for rank in "123"]
    assert [row[2:] for row in rows[3:6]] == [["", ""]] * 3
    for group in (rows[:3], rows[6:]):
        assert [float(row[2]) for row in group] == sorted((float(row[2]) for row in group), reverse=True)
    assert [rows[0][3], rows[6][3]] == library(["baki lo", "mu"], beam_size=5)


def test_tabs_in_a_translation_do_not_make_columns() -> None:
    from mtkit.decoding.lines import RankedText, Translation

    ranked = RankedText(text="a\tb", tokens=(5,), score=-1.0, log_prob=-1.0, finished=True)
    translation = Translation(line=3, text="a\tb", hypotheses=(ranked,))
    assert list(command._text_lines(translation, n_best=2)) == ["3\t1\t-1.000000\ta b", "3\t2\t\t"]
    assert list(command._text_lines(translation, n_best=1)) == ["a\tb"]


def test_json_has_scores_that_scoring_the_tokens_gives(run: Run) -> None:
    lines = ["", *sentences(12, seed=3)]
    objects = [json.loads(line) for line in text_lines(run("--json", "--n-best", "4", data="\n".join(lines).encode()))]
    assert [item["line"] for item in objects] == list(range(1, 14))
    assert objects[0] == {"line": 1, "text": "", "source_cut": False, "hypotheses": []}
    tokenizer, model = tiny_tokenizer(), random_model(4)
    checked = 0
    for item in objects:
        assert len(item["hypotheses"]) == (4 if item["line"] > 1 else 0)
        for hypothesis in item["hypotheses"]:
            assert set(hypothesis) == {"text", "score", "log_prob", "tokens", "finished"}
            ids = tokenizer.piece_ids(hypothesis["tokens"], "tgt")
            if hypothesis["finished"]:
                source = tokenizer.encode([lines[item["line"] - 1]], "src")
                assert hypothesis["log_prob"] == pytest.approx(score_token_pairs(model, source, [ids])[0].log_prob, abs=1e-4)
                checked += 1
    assert checked > 5
    assert [item["text"] for item in objects] == library(lines)


# --- options ----------------------------------------------------------------------------------------------------------------------------


def test_flags_and_settings_reach_the_search(run: Run) -> None:
    lines = sentences(8, seed=6)
    data = "\n".join(lines).encode()
    num_threads = torch.get_num_threads()
    assert text_lines(run("-b", "1", "--threads", str(num_threads), data=data)) == library(lines, beam_size=1)
    assert torch.get_num_threads() == num_threads
    assert text_lines(run("--length-penalty", "2", "--set", "penalty=power", data=data)) == library(lines, length_penalty=2.0, penalty="power")
    sampled = run("--sample", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.8", "--seed", "5", data=data)
    assert text_lines(sampled) == library(lines, method="sample", temperature=0.7, top_k=9, top_p=0.8, seed=5)
    assert text_lines(run("--set", "beam_size=7", "--beam-size", "1", data=data)) == library(lines, beam_size=1)


def test_the_help_names_the_defaults_of_the_search() -> None:
    text = " ".join(CliRunner().invoke(app, ["translate", "--help"]).stdout.split())
    defaults = SearchConfig()
    for flag, value in {
        "--beam-size": defaults.beam_size,
        "--length-penalty": defaults.length_penalty,
        "--n-best": defaults.n_best,
        "--temperature": int(defaults.temperature),
        "--seed": defaults.seed,
        "--batch-tokens": BATCH_TOKENS,
    }.items():
        assert text.split(f"{flag} <")[1].split("[default: ")[1].startswith(f"{value}]"), flag


def test_slots_give_the_same_lines(run: Run) -> None:
    data = "".join(f"{line}\n" for line in ["", *sentences(15, seed=3), "  "]).encode()
    slots = run("--engine", "slots", "--device", "cpu", "--json", data=data)
    assert "in slots; made for GPUs, --engine mtkit is several times faster on a CPU\n" in slots.stderr
    theirs, ours = ([json.loads(line) for line in text_lines(result)] for result in (slots, run("--json", data=data)))
    assert [(entry["line"], entry["text"]) for entry in theirs] == [(entry["line"], entry["text"]) for entry in ours]


def test_several_models_are_an_ensemble(run: Run, model_dir: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", random_model(2), tiny_tokenizer())
    foreign = save(tmp_path / "foreign", random_model(3, tokenizer=tiny_tokenizer(seed=2)), tiny_tokenizer(seed=2))
    data = "\n".join(sentences(8, seed=6)).encode()
    together = run(models=(model_dir, other), data=data)
    assert together.stdout not in (run(data=data).stdout, run(models=(other,), data=data).stdout)
    refused = run(models=(model_dir, foreign), data=data, exit_code=4)
    assert "have different tokenizers" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--n-best", "5"], 2, "n_best (--n-best) must be at most beam_size, but is 5 with beam_size 4"),
        (["--temperature", "0.5"], 2, "temperature (--temperature) is for method sample"),
        (["--set", "beamsize=5"], 2, "Did you mean beam_size?"),
        (["--set", "length_penalty=-1"], 2, "length_penalty (--set length_penalty=-1) must be at least 0"),
        (["--engine", "slots", "--sample"], 2, "--engine slots is for one model and a beam"),
        (["--threads", "1025"], 2, "'--threads'"),
        (["--device", "tpu"], 2, "device must be auto, cpu, cuda or cuda:N"),
        (["--device", "cpu", "--precision", "fp16"], 2, "precision fp16 needs a GPU"),
        (["--input", "missing.txt"], 3, "missing.txt: cannot be read"),
    ],
)
def test_mistakes_are_named(run: Run, arguments: list[str], exit_code: int, message: str) -> None:
    result = run(*arguments, data=b"baki\n", exit_code=exit_code)
    assert message in result.stderr
    assert result.stdout == ""


def test_a_missing_model_is_named(run: Run, tmp_path: Path) -> None:
    assert "nowhere" in run(models=(tmp_path / "nowhere",), exit_code=4).stderr


def test_text_in_the_place_of_a_model_is_told_where_it_belongs(run: Run, model_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "test.en"
    text.write_text("baki\n")
    assert f"--input {text}" in run(models=(model_dir, text), exit_code=2).stderr


# --- pipes ------------------------------------------------------------------------------------------------------------------------------


def read_line_within(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else None


def test_a_program_that_writes_a_line_reads_its_translation_at_once(model_dir: Path) -> None:
    lines = ["bükß é lo", "", "mu ner"]
    with start(model_dir, bufsize=0) as process:
        assert process.stdin is not None
        for line, expected in zip(lines, library(lines), strict=True):
            process.stdin.write(line.encode() + b"\n")
            assert read_line_within(process, 60) == expected.encode() + b"\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_reader_that_leaves_ends_the_command_quietly(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes("".join(f"{line}\n" for line in sentences(20_000, seed=7)).encode())
    with start(model_dir, "--input", str(path), "--batch-tokens", "200", "--quiet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert read_line_within(process, 60)
        process.stdout.close()
        assert process.wait(60) in (0, 141)
        assert b"Traceback" not in process.stderr.read()


# --- CTranslate2 ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(model_dir: Path) -> Path:
    export_ctranslate2(load_model(model_dir), model_dir.parent / "exported")
    return model_dir.parent / "exported"


CT2 = ("--engine", "ct2", "--device", "cpu", "--threads", "1")


def test_an_export_gives_the_same_lines_columns_and_objects(run: Run, exported: Path) -> None:
    data = "".join(f"{line}\n" for line in ["", *sentences(15, seed=3), "  "]).encode()
    ours, theirs = text_lines(run(data=data)), text_lines(run(*CT2, models=(exported,), data=data))
    assert sum(mine == other for mine, other in zip(ours, theirs, strict=True)) > 9
    assert [theirs[0], theirs[-1]] == ["", ""]

    mine, other = (
        [json.loads(line) for line in text_lines(result)] for result in (run("--json", data=data), run(*CT2, "--json", models=(exported,), data=data))
    )
    assert [(list(entry), [list(h) for h in entry["hypotheses"]]) for entry in other] == [
        (list(entry), [list(h) for h in entry["hypotheses"]]) for entry in mine
    ]
    same = [(a["hypotheses"][0], b["hypotheses"][0]) for a, b in zip(mine, other, strict=True) if a["text"] == b["text"] != ""]
    for key in ("score", "log_prob"):
        assert [b[key] for _, b in same] == pytest.approx([a[key] for a, _ in same], abs=1e-4)

    rows = [line.split("\t") for line in text_lines(run(*CT2, "--n-best", "3", models=(exported,), data=data))]
    assert [row[:2] for row in rows] == [[str(line), rank] for line in range(1, 18) for rank in "123"]
    assert [row[2:] for row in rows[:3]] == [["", ""]] * 3


def test_the_settings_of_the_search_reach_ctranslate2(run: Run, exported: Path, tmp_path: Path) -> None:
    data = "\n".join(sentences(8, seed=6)).encode()
    result = run(*CT2, models=(exported,), data=data)
    assert result.stderr.startswith("CTranslate2 ")
    assert " on cpu, float32, 1 at a time\n" in result.stderr
    assert "tokens/s" in result.stderr
    greedy = run(*CT2, "--beam-size", "1", "--quiet", models=(exported,), data=data)
    assert "CTranslate2" not in greedy.stderr
    assert "tokens/s" not in greedy.stderr
    assert text_lines(greedy) != text_lines(result)
    shorter = run(*CT2, "--set", "max_length_ratio=0", "--set", "max_length_constant=2", "--json", models=(exported,), data=data)
    assert max(len(json.loads(line)["hypotheses"][0]["tokens"]) for line in text_lines(shorter)) == 2
    batched = run(*CT2, "--batch-tokens", "8", "--precision", "fp32", "-o", str(tmp_path / "out"), models=(exported,), data=data)
    assert (tmp_path / "out").read_bytes() == result.stdout_bytes
    assert batched.stdout_bytes == b""


def test_the_settings_of_the_machine_reach_ctranslate2(run: Run, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def record(path: Path, **options: Any) -> Any:
        given.update(options)
        return load_ctranslate2(path, **options)

    monkeypatch.setattr("mtkit.decoding.engine.ct2.load_ctranslate2", record)
    words = ("--engine", "ct2", "--device", "cpu", "--threads", "2", "--precision", "fp32", "--batch-tokens", "8")
    run(*words, models=(exported,), data=b"baki\n")
    assert given.pop("search") == SearchConfig(max_length_constant=5)
    assert given == {"device": "cpu", "precision": "fp32", "threads": 2, "exact_scores": False, "batch_tokens": 8}


def test_what_does_not_go_with_ctranslate2_is_named(run: Run, model_dir: Path, exported: Path) -> None:
    for arguments, models, exit_code, message in (
        (CT2, (exported, exported), 2, "--engine ct2 takes one export, but 2 were given"),
        ((*CT2, "--sample"), (exported,), 2, "--sample does not go with --engine ct2"),
        ((*CT2, "--set", "max_source_length=3000"), (exported,), 2, "max_source_length must be below 2048 with --engine ct2"),
        (("--engine", "ct2", "--device", "tpu"), (exported,), 2, "device must be auto, cpu, cuda or cuda:N"),
        (CT2, (model_dir,), 4, "mtkit export MODEL --format ctranslate2"),
        ((), (exported,), 4, "mtkit translate --engine ct2"),
    ):
        result = run(*arguments, models=models, data=b"baki\n", exit_code=exit_code)
        assert message in result.stderr
        assert result.stdout == ""


def test_a_terminal_shows_how_far_a_file_is(model_dir: Path, tmp_path: Path) -> None:
    text, result = tmp_path / "in.txt", tmp_path / "out.txt"
    text.write_text("ba ki\n" * 30)
    script = """
import sys
from mtkit.cli.app import main
sys.stderr.isatty = lambda: True
main()
"""
    words = [sys.executable, "-c", script, "translate", str(model_dir), *CAP, "--input", str(text), "--output", str(result), "--threads", "1"]
    environment = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "100"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert "30/30" in done.stderr
    assert "lines/s" in done.stderr
    assert len(result.read_text().splitlines()) == 30
    assert subprocess.run([*words, "--quiet"], capture_output=True, text=True, env=environment, check=True).stderr == ""


def test_a_missing_input_is_told_before_a_model_is_loaded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.decoding.loading.load_translator", lambda *_arguments, **_options: pytest.fail("loads a model"))
    for name, reason in (("nowhere", "No such file or directory"), (".", "Is a directory")):
        assert f"{tmp_path / name}: cannot be read: {reason}" in run("--input", str(tmp_path / name), exit_code=3).stderr


def test_who_types_is_told_that_lines_are_waited_for(model_dir: Path) -> None:
    master, slave = os.openpty()
    words = [sys.executable, "-m", "mtkit", "translate", str(model_dir), *CAP, "--threads", "1"]
    with subprocess.Popen(words, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(slave)
        assert process.stderr is not None
        assert process.stderr.readline() == b"reads lines from the terminal; Ctrl-D ends them\n"
        os.write(master, b"baki\n\x04")
        output, errors = process.communicate(timeout=60)
    os.close(master)
    assert output.count(b"\n") == 1
    assert b"1 lines, " in errors


def test_translations_begin_as_a_file_says(run: Run, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    prefixes.write_text("baki\n\nduna fogi\n")
    data = "".join(f"{line}\n" for line in sentences(3, seed=3)).encode()
    free, found = text_lines(run(data=data)), text_lines(run("--prefix", str(prefixes), data=data))
    assert (found[0].startswith("baki"), found[1] == free[1], found[2].startswith("duna fogi")) == (True, True, True)
    assert not free[0].startswith("baki")
    assert "there are 3 prefixes, and more lines to translate" in run("--prefix", str(prefixes), data=data * 2, exit_code=3).stderr
    for words, message in (
        (["--prefix", str(prefixes), "--engine", "slots"], "--prefix does not go with --engine slots"),
        (["--prefix", "-"], "--prefix cannot be stdin"),
    ):
        assert message in run(*words, data=data, exit_code=2).stderr
    assert "nowhere: cannot be read" in run("--prefix", "nowhere", data=data, exit_code=3).stderr
