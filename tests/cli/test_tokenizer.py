import gzip
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mtkit.artefacts import atomic_directory
from mtkit.cli import tokenizer as tokenizer_cli
from mtkit.cli.app import app as mtkit_app
from mtkit.cli.app import global_options
from mtkit.data.tokenizer import Tokenizer

ENGLISH = ["The dog sees the cat.", "A cat sleeps on the warm roof.", "Two dogs run over the bridge.", "The teacher opens a window."] * 5
GERMAN = ["Der Hund sieht die Katze.", "Eine Katze schläft auf dem Dach.", "Zwei Hunde laufen über die Brücke.", "Der Lehrer öffnet ein Fenster."] * 5


application = typer.Typer(cls=mtkit_app.info.cls)
application.callback()(global_options)
tokenizer_cli.register(application)


def run(*arguments: str | Path, text: bytes | None = None) -> Result:
    return CliRunner().invoke(application, ["tokenizer", *map(str, arguments)], input=text)


def succeed(*arguments: str | Path, text: bytes | None = None) -> bytes:
    result = run(*arguments, text=text)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "en").write_text("\n".join(ENGLISH) + "\n", "utf-8")
    (directory / "de").write_text("\n".join(GERMAN) + "\n", "utf-8")
    (directory / "de.gz").write_bytes(gzip.compress((directory / "de").read_bytes()))
    return directory


@pytest.fixture(scope="module")
def joint(corpus: Path) -> Path:
    succeed("train", corpus / "en", corpus / "de", "--output", corpus / "joint", "--vocab-size", "360", "--type", "bpe")
    return corpus / "joint"


@pytest.fixture(scope="module")
def separate(corpus: Path) -> Path:
    succeed("train", "--src", corpus / "en", "--tgt", corpus / "de", "-o", corpus / "separate", "--separate", "--type", "bpe", "--vocab-size", "310")
    return corpus / "separate"


# --- train ----------------------------------------------------------------------------------------------------------------------------


def test_plain_and_gzip_files_give_the_same_tokenizer(joint: Path, corpus: Path, tmp_path: Path) -> None:
    result = run("train", corpus / "en", corpus / "de.gz", "--output", tmp_path / "t", "--vocab-size", "360", "--type", "bpe")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "360 pieces (bpe) from 40 of 40 lines" in result.stderr
    assert (tmp_path / "t" / "tokenizer.model").read_bytes() == (joint / "tokenizer.model").read_bytes()


def test_text_can_come_from_stdin(joint: Path, corpus: Path, tmp_path: Path) -> None:
    text = (corpus / "en").read_bytes() + (corpus / "de").read_bytes()
    succeed("train", "-", "--output", tmp_path / "t", "--vocab-size", "360", "--type", "bpe", text=text)
    assert Tokenizer.load(tmp_path / "t").fingerprint == Tokenizer.load(joint).fingerprint


def test_one_vocabulary_for_each_side(separate: Path) -> None:
    tokenizer = Tokenizer.load(separate)
    assert not tokenizer.joint
    assert tokenizer.config.type == "bpe"
    assert tokenizer.encode(["Der Hund"], "src") != tokenizer.encode(["Der Hund"], "tgt")


def test_settings_come_from_file_set_and_flags_in_this_order(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text('vocab_size = 301\nseed = 5\ntype = "bpe"\n', "utf-8")
    (tmp_path / "run.toml").write_text('[tokenizer]\nvocab_size = 301\nseed = 5\ntype = "bpe"\n[optim]\nlr = 1\n', "utf-8")
    for name in ("bare", "run"):
        options: list[str | Path] = [
            "--config",
            tmp_path / f"{name}.toml",
            "--set",
            "vocab_size=302",
            "--set",
            "seed=6",
            "--vocab-size",
            "303",
            "--json",
        ]
        answer = json.loads(succeed("train", corpus / "en", "-o", tmp_path / name, *options))
        tokenizer = Tokenizer.load(tmp_path / name)
        assert (tokenizer.config.vocab_size, tokenizer.config.seed, tokenizer.config.type) == (303, 6, "bpe")
        assert answer["src_vocab_size"] == answer["tgt_vocab_size"] == 303
        assert answer["fingerprint"] == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--vocab-size", "30000"], 2, "the largest possible size is"),
        (["--vocab-size", "100"], 2, "the smallest possible size is"),
        (["--set", "vocab_sise=300"], 2, "unknown key vocab_sise"),
        (["--type", "word"], 2, "type (--type) must be one of unigram, bpe"),
        (["--config", "nowhere.toml"], 2, "nowhere.toml: cannot be read"),
        (["--separate"], 2, "which file is which"),
        (["--src", "nowhere.en"], 3, "nowhere.en: there is no such file"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(options: list[str], code: int, message: str, corpus: Path, tmp_path: Path) -> None:
    result = run("train", corpus / "en", "--output", tmp_path / "t", *options)
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_no_text_is_a_mistake(corpus: Path, tmp_path: Path) -> None:
    assert run("train", "--output", tmp_path / "t").exit_code == 2
    assert run("train", "--separate", "--src", corpus / "en", "--output", tmp_path / "t").exit_code == 2
    result = run("train", "-", "--output", tmp_path / "t", text=b"\n  \n")
    assert result.exit_code == 3
    assert "the text is empty" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "damaged.gz").write_bytes(gzip.compress(b"text\n" * 1000)[:20])
    result = run("train", tmp_path / "damaged.gz", "--output", tmp_path)
    assert result.exit_code == 1
    assert "exists already" in result.stderr


def test_repaired_lines_are_reported(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"caf\xe9\n" + (corpus / "en").read_bytes() + b"x" * (5 << 20))
    result = run(
        "train", tmp_path / "bad", "--output", tmp_path / "t", "--vocab-size", "320", "--type", "bpe", "--set", "character_coverage=1", "--quiet"
    )
    assert result.exit_code == 0
    assert "1 lines hold bytes that are not UTF-8" in result.stderr
    assert "1 lines are longer than 4194304 bytes" in result.stderr
    assert "pieces" not in result.stderr


# --- encode and decode ------------------------------------------------------------------------------------------------------------------


def test_pieces_and_ids_there_and_back(joint: Path) -> None:
    text = "The dog runs.\n\n  \nDer Hund läuft: 犬 </s>\n".encode()
    expected = "The dog runs.\n\n\nDer Hund läuft: 犬 </s>\n".encode()
    pieces = succeed("encode", joint, text=text)
    ids = succeed("encode", joint, "--ids", text=text)
    assert pieces.startswith("▁The ▁".encode())
    assert pieces.count(b"\n") == ids.count(b"\n") == 4
    assert ids.split(b"\n")[1:3] == [b"", b""]
    assert set(ids) <= set(b"0123456789 \n")
    assert succeed("decode", joint, text=pieces) == expected
    assert succeed("decode", joint, "--ids", text=ids) == expected


def test_files_are_read_and_written(joint: Path, tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"The dog\r\n\nThe cat"))
    assert succeed("encode", joint, "--input", tmp_path / "in.gz", "--output", tmp_path / "ids", "--ids") == b""
    assert succeed("decode", joint, "--ids", "-i", tmp_path / "ids") == b"The dog\n\nThe cat\n"


def test_exotic_spaces_inside_pieces_do_not_part_them(tmp_path: Path) -> None:
    text = "10\u00a0000 Euro\u3000und  mehr\n".encode()
    settings = ["--set", "normalization=identity", "--set", "character_coverage=1", "--vocab-size", "285", "--type", "bpe"]
    succeed("train", "-", "--output", tmp_path / "t", *settings, text=text)
    pieces = succeed("encode", tmp_path / "t", text=text)
    assert "\u00a0".encode() in pieces
    assert succeed("decode", tmp_path / "t", text=pieces) == text


def test_each_side_has_its_own_pieces(separate: Path) -> None:
    text = b"Der Hund\n"
    src, tgt = (succeed("encode", separate, "--side", side, "--ids", text=text) for side in ("src", "tgt"))
    assert src != tgt
    assert succeed("decode", separate, "--side", "tgt", "--ids", text=tgt) == text
    result = run("encode", separate, text=text)
    assert result.exit_code == 2
    assert "--side src or --side tgt" in result.stderr


def test_a_bundled_tokenizer_is_found(joint: Path, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / "tokenizer").mkdir()
        Tokenizer.load(joint).write_files(directory / "tokenizer")
    for place in (tmp_path / "model", tmp_path):  # as a run holds its model
        assert succeed("encode", place, text=b"The dog\n") == succeed("encode", joint, text=b"The dog\n")
        assert succeed("decode", place, text=succeed("encode", place, text=b"The dog\n")) == b"The dog\n"


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (["--ids"], b"5 6\n\n7 360\n", "stdin:3: id 360 is outside the src vocabulary of 360 pieces"),
        (["--ids"], b"5 6\n-1\n", "stdin:2: '-1' is not a token id"),
        (["--ids"], "5 ٣\n".encode(), "stdin:1: "),
        (["--ids"], b"1" * 5000 + b"\n", "is not a token id"),
        ([], "▁The\n▁The nonsense\n".encode(), "stdin:2: 'nonsense' is not a piece of the src vocabulary"),
    ],
)
def test_what_cannot_be_decoded_is_named(options: list[str], text: bytes, message: str, joint: Path) -> None:
    result = run("decode", joint, *options, text=text)
    assert result.exit_code == 3
    assert message in result.stderr


def test_the_line_number_counts_over_windows(joint: Path, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"5\n" * 2500 + b"x\n")
    result = run("decode", joint, "--ids", "--input", tmp_path / "ids", "--output", tmp_path / "text")
    assert f"{tmp_path / 'ids'}:2501: 'x' is not a token id" in result.stderr
    assert not (tmp_path / "text").exists()


def test_an_id_that_breaks_the_line_is_a_space_in_the_output(joint: Path) -> None:
    tokenizer = Tokenizer.load(joint)
    newline, paragraph = tokenizer.piece_ids(["<0x0A>"], "src"), tokenizer.piece_ids(["<0xE2>", "<0x80>", "<0xA9>"], "src")
    dog = tokenizer.encode(["dog"], "src")[0]
    text = " ".join(map(str, dog + newline + dog + paragraph + dog)).encode()
    assert succeed("decode", joint, "--ids", text=text) == b"dog  dog  dog\n"


def test_something_else_is_not_a_tokenizer(corpus: Path) -> None:
    result = run("encode", corpus, text=b"x\n")
    assert result.exit_code == 4
    assert str(corpus) in result.stderr


@given(
    text=st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"\n", b"\r", b"\r\n", "\u2028".encode(), b"\x85", b"\x0b", b"<s>"]))).map(
        b"".join
    )
)
@example(text=b"")
@example(text=b"\n")
@example(text=b"a\xe2\x80\xa8b\xc2\x85c\x0bd\x0ce\x1cf")
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_keep_their_number_of_lines(text: bytes, joint: Path) -> None:
    num_lines = text.count(b"\n") + (text != b"" and not text.endswith(b"\n"))
    for options in ([], ["--ids"]):
        encoded = succeed("encode", joint, *options, text=text)
        decoded = succeed("decode", joint, *options, text=encoded)
        for output in (encoded, decoded):
            assert output.count(b"\n") == len(output.decode("utf-8").splitlines()) == num_lines


def test_a_slow_producer_gets_each_line_back_at_once(joint: Path) -> None:
    command = [sys.executable, "-m", "mtkit", "tokenizer", "encode", str(joint)]
    environment = dict(os.environ, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUNBUFFERED="")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("The dog", "", "über die Brücke"):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60.0)[0], "no answer before the next line"
            answer = process.stdout.readline().decode()
            assert answer.replace(" ", "").replace("▁", " ").strip() == line
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(60.0) == 0


def test_a_closed_pipe_ends_quietly(joint: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"The dog sees the cat.\n" * 100_000)
    command = [sys.executable, "-m", "mtkit", "tokenizer", "encode", str(joint), "--input", str(tmp_path / "long")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60.0) == 141


def test_what_holds_both_sides_is_read_as_what_it_is(joint: Path, separate: Path, corpus: Path, tmp_path: Path) -> None:
    """And not as sentences with braces, commas or tabs in them."""
    records = [json.dumps({"translation": {"en": src, "de": tgt}}) + "\n" for src, tgt in zip(ENGLISH, GERMAN, strict=True)]
    (tmp_path / "text.jsonl").write_text("".join(records))
    (tmp_path / "text.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in zip(ENGLISH, GERMAN, strict=True)), "utf-8")
    languages = ["--src-lang", "en", "--tgt-lang", "de"]
    for name, options in (("text.jsonl", languages), ("text.tsv", [])):
        for like, size in ((joint, ["360"]), (separate, ["310", "--separate"])):
            output = tmp_path / f"{name}-{like.name}"
            succeed("train", tmp_path / name, "--output", output, "--type", "bpe", "--vocab-size", *size, *options)
            assert Tokenizer.load(output).encode(ENGLISH, "src") == Tokenizer.load(like).encode(ENGLISH, "src")
            assert Tokenizer.load(output).encode(GERMAN, "tgt") == Tokenizer.load(like).encode(GERMAN, "tgt")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["text.jsonl"], 2, "it was not said which is the source"),
        (["--src", "text.tsv"], 2, "text.tsv: holds both sides"),
        (["test.sgm"], 3, "test.sgm: is SGML or XML, not plain text"),
        (["missing.tsv"], 3, "missing.tsv: cannot be read"),
    ],
)
def test_what_is_no_text_is_refused(arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B16."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.jsonl", "text.tsv"):
        Path(name).write_text("a\tb\n" * 100)
    Path("test.sgm").write_text('<srcset setid="x">\n<seg id="1">A dog.</seg>\n</srcset>\n')
    result = run("train", *arguments, "--output", "t", "--vocab-size", "300")
    assert result.exit_code == code
    assert message in result.stderr
    assert not Path("t").exists()


def test_pieces_hold_what_is_no_line_break_here(tmp_path: Path) -> None:
    text = ("p\u0085q r\u2028s\n" * 20).encode()
    settings = ["--set", "normalization=identity", "--set", "character_coverage=1", "--vocab-size", "269", "--type", "bpe"]
    succeed("train", "-", "--output", tmp_path / "t", *settings, text=text)
    assert succeed("decode", tmp_path / "t", text=succeed("encode", tmp_path / "t", text=text)) == b"p q r s\n" * 20, "as decode --ids has it"


def test_columns_that_are_taken_for_text_are_told(corpus: Path, tmp_path: Path) -> None:
    table = "".join(f"{src}\t{tgt}\n" for src, tgt in zip(ENGLISH, GERMAN, strict=True)).encode()
    options = ["--vocab-size", "350", "--type", "bpe"]
    result = run("train", "-", "--output", tmp_path / "a", *options, text=table)
    assert "stdin: 20 of 20 lines hold one tab, and were taken for text, tab and all" in result.stderr
    (tmp_path / "t.tsv").write_bytes(table + b"caf\xe9\tKaffee\n")
    result = run("train", tmp_path / "t.tsv", "--output", tmp_path / "b", *options)
    assert "hold one tab" not in result.stderr
    assert "t.tsv: 1 lines hold bytes that are not UTF-8" in result.stderr
    result = run("train", "-", corpus / "en", "-", "--output", tmp_path / "c", *options, text=table)
    assert (result.exit_code, "stdin (-) can stand for one text only" in result.stderr) == (2, True)
