import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtkit.artefacts import read_manifest
from mtkit.config import from_dict
from mtkit.data import blocks as blocks_module
from mtkit.data.corpus import Corpus, parse_corpus
from mtkit.data.filters import FilterConfig
from mtkit.data.partial import partial_directory
from mtkit.data.preprocess import PreprocessConfig, PreprocessReport, preprocess
from mtkit.data.shards import ShardSet
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ConfigError, DataError, MTKitError, UsageError
from tests.helpers import REPOSITORY, shared_data

ALL_FILTERS = FilterConfig(max_length=60, max_length_ratio=4.0, max_nonprinting_share=0.2, drop_identical=True, drop_duplicates=True)
Pairs = list[tuple[str, str]]
LINE_BYTES = st.lists(
    st.sampled_from([b"a", b"\r", b" ", b"\t", b"\0", b"\xff", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\xc2\x85", b"\x0b", b"\x1c"])
).map(b"".join)


def run(corpus: Corpus, output: Path, tokenizer: Tokenizer, **options: Any) -> PreprocessReport:
    return preprocess(corpus, **{"held_out": {}, "tokenizer": tokenizer, "output": output, "config": PreprocessConfig(), **options})


def decode(output: Path) -> Pairs:
    """The pairs of a shard set as text; the small tokenizer spells all of it."""
    shards = ShardSet.open(output, verify="full")
    indices = range(shards.num_pairs)
    src = shards.tokenizer.decode([shards.src(index).tolist() for index in indices], "src")
    return list(zip(src, shards.tokenizer.decode([shards.tgt(index).tolist() for index in indices], "tgt"), strict=True))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def mixed_pairs(make_pairs: Callable[..., Pairs]) -> Pairs:
    """300 pairs, some of which every filter drops, duplicates far apart."""
    pairs = make_pairs(240)
    bad = [("", "leer"), ("Anna " * 80, "Anna " * 80), ("Anna", "Anna sieht Haus und Garten und Fluss"), ("Emil", "Emil"), ("a\x00\x01", "b")]
    mixed = pairs + pairs[:50] + bad * 2
    random.Random(1).shuffle(mixed)
    return mixed


# --- what comes out -----------------------------------------------------------------------------------------------------------------------


def test_pairs_are_filtered_and_the_others_kept_in_order(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs) -> None:
    config = PreprocessConfig(filters=ALL_FILTERS, shard_pairs=70)
    report = run(write_corpus(mixed_pairs), tmp_path / "out", tokenizer, config=config)
    expected = {"empty": 2, "identical": 2, "nonprinting": 2, "too_long": 0, "length_ratio": 2, "duplicate": 50}
    # "Anna " * 80 on both sides is identical before it is too long.
    assert report.dropped == {**expected, "identical": 4}
    assert (report.num_read, report.num_pairs, report.num_shards) == (300, 240, 5)
    seen: set[tuple[str, str]] = set()
    unique = [pair for pair in mixed_pairs if pair not in seen and not seen.add(pair)]  # type: ignore[func-returns-value]
    assert decode(tmp_path / "out") == [(src, tgt) for src, tgt in unique if len(src) > 10 and len(src) < 100]
    shards = ShardSet.open(tmp_path / "out")
    assert report.num_src_tokens == shards.src_lengths.sum()
    assert report.num_tgt_tokens == shards.tgt_lengths.sum()
    assert list(report.dropped) == ["empty", "identical", "nonprinting", "too_long", "length_ratio", "duplicate"]


@pytest.mark.parametrize(
    ("filters", "dropped"),
    [
        (FilterConfig(max_length=None, max_length_ratio=None), {"empty": 2, "nonprinting": 2}),
        (FilterConfig(max_length_ratio=None, max_length=60), {"empty": 2, "nonprinting": 2, "too_long": 2}),
        (FilterConfig(max_length=None, max_length_ratio=None, max_nonprinting_share=None), {"empty": 2}),
        (FilterConfig(max_length=None, max_length_ratio=4.0, max_nonprinting_share=None), {"empty": 2, "length_ratio": 2}),
        (FilterConfig(max_length=None, max_length_ratio=None, max_nonprinting_share=None, drop_identical=True), {"empty": 2, "identical": 4}),
        (FilterConfig(max_length=None, max_length_ratio=None, max_nonprinting_share=None, drop_duplicates=True), {"empty": 2, "duplicate": 54}),
    ],
)
def test_each_filter_can_be_off(
    tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs, filters: FilterConfig, dropped: dict[str, int]
) -> None:
    report = run(write_corpus(mixed_pairs), tmp_path / "out", tokenizer, config=PreprocessConfig(filters=filters))
    assert report.dropped == dropped
    assert report.num_pairs == 300 - sum(dropped.values())


@pytest.mark.parametrize(
    ("src", "tgt", "kept"),
    [
        (b"a\n\nc\n", b"A\nB\nC\n", [("a", "A"), ("c", "C")]),  # never (c, B)
        (b"1\n2\n3\n\n5\n6\n7\n8\n9\n10\n", b"1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n", [(str(n), str(n)) for n in range(1, 11) if n != 4]),
        (b"a\nb", b"A\nB\n", [("a", "A"), ("b", "B")]),
        (b"x\ry\r\nz\r\n", b"X\nZ\n", [("x y", "X"), ("z", "Z")]),
        ("\ufeffa\u2028b\x85c\x0bd\x0ce\x1cf\ufeff\n".encode(), b"A\n", [("a b c d e f", "A")]),
    ],
)
def test_line_rules(tmp_path: Path, tokenizer: Tokenizer, src: bytes, tgt: bytes, kept: Pairs) -> None:
    (tmp_path / "a.en").write_bytes(src)
    (tmp_path / "a.de").write_bytes(tgt)
    report = run(parse_corpus([str(tmp_path / "a.en"), str(tmp_path / "a.de")]), tmp_path / "out", tokenizer)
    assert report.num_pairs == len(kept)
    shards = ShardSet.open(tmp_path / "out")
    for index, (src_text, tgt_text) in enumerate(kept):
        assert [shards.tgt(index).tolist()] == tokenizer.encode([tgt_text], "tgt")
        if "e f" not in src_text:  # what the tokenizer makes of the separators is its own business
            assert [shards.src(index).tolist()] == tokenizer.encode([src_text], "src")


@settings(max_examples=25)
@given(st.lists(st.tuples(LINE_BYTES, LINE_BYTES), min_size=1, max_size=6))
def test_any_bytes_stay_in_their_pairs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, lines: list[tuple[bytes, bytes]]) -> None:
    root = tmp_path_factory.mktemp("bytes")
    good = (b"Anna sees the house", b"Anna sieht Haus")
    for side, name in enumerate(("a.en", "a.de")):
        (root / name).write_bytes(b"".join(pair[side] + b"\n" for pair in [*lines, good]))
    corpus = parse_corpus([str(root / "a.en"), str(root / "a.de")])
    report = run(corpus, root / "out", tokenizer, held_out={"dev": corpus})
    assert report.num_read == len(lines) + 1 == report.num_pairs + sum(report.dropped.values())
    shards = ShardSet.open(root / "out")
    assert [shards.tgt(report.num_pairs - 1).tolist()] == tokenizer.encode([good[1].decode()], "tgt")
    assert list(zip(*shards.held_out("dev"), strict=True)) == list(corpus.pairs())


def test_user_text_yields_no_control_ids(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any) -> None:
    run(write_corpus([("He wrote </s> and <pad> and <s> and <unk>", "<s></s>")]), tmp_path / "out", tokenizer)
    shards = ShardSet.open(tmp_path / "out")
    assert min(shards.src(0).min(), shards.tgt(0).min()) > 3


def test_separate_vocabularies_each_serve_their_side(tmp_path: Path, other_tokenizer: Tokenizer, write_corpus: Any) -> None:
    text = "Anna sees the Käse"
    run(write_corpus([(text, text)]), tmp_path / "out", other_tokenizer)
    shards = ShardSet.open(tmp_path / "out")
    assert [shards.src(0).tolist()] == other_tokenizer.encode([text], "src")
    assert [shards.tgt(0).tolist()] == other_tokenizer.encode([text], "tgt")


def test_held_out_sets_are_kept_whole_and_raw(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    dev = [("a … ", " “b”"), ("", "leer"), ("same", "same"), ("x" * 5000, "y"), ("same", "same"), ("\x00\x00", "\u2028")]
    held_out = {"dev": write_corpus(dev, name="dev"), "test-1": write_corpus(dev[:2], name="test")}
    report = run(write_corpus(make_pairs(5)), tmp_path / "out", tokenizer, held_out=held_out, config=PreprocessConfig(filters=ALL_FILTERS))
    assert report.held_out == {"dev": 6, "test-1": 2}
    shards = ShardSet.open(tmp_path / "out")
    assert list(zip(*shards.held_out("dev"), strict=True)) == dev
    assert list(zip(*shards.held_out("test-1"), strict=True)) == dev[:2]
    with pytest.raises(UsageError, match="'../x' cannot be the name of a set"):
        run(write_corpus(make_pairs(5)), tmp_path / "other", tokenizer, held_out={"../x": held_out["dev"]})


def test_mended_lines_and_unknown_tokens_are_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, data in (("a.en", b"Anna caf\xe9\nBernd\n"), ("a.de", "Anna\nλ\n".encode()), ("dev.en", b"\xff\n"), ("dev.de", b"x\n")):
        (tmp_path / name).write_bytes(data)
    corpora = [parse_corpus([str(tmp_path / f"{name}.en"), str(tmp_path / f"{name}.de")]) for name in ("a", "dev")]
    report = run(corpora[0], tmp_path / "out", tokenizer, held_out={"dev": corpora[1]})
    assert report.num_bad_utf8 == 2
    assert report.num_src_unknown >= 3  # U+FFFD is three bytes
    assert report.num_tgt_unknown == 2


def test_records_and_text_give_the_same_shards(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    pairs = make_pairs(20)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"translation": {"en": src, "de": tgt}}) + "\n" for src, tgt in pairs))
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress("".join(f"{src}\t{tgt}\n" for src, tgt in pairs).encode()))
    run(write_corpus(pairs), tmp_path / "text", tokenizer)
    for name in ("a.jsonl", "a.tsv.gz"):
        run(parse_corpus([str(tmp_path / name)], src_lang="en", tgt_lang="de"), tmp_path / name.replace(".", "-"), tokenizer)
        assert ShardSet.open(tmp_path / name.replace(".", "-")).fingerprint == ShardSet.open(tmp_path / "text").fingerprint


def test_report_and_manifest_say_what_was_made(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    report = run(write_corpus(make_pairs(20)), tmp_path / "out", tokenizer)
    plain_report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert from_dict(PreprocessReport, plain_report) == report
    assert "num_reused_shards" not in plain_report
    manifest = read_manifest(tmp_path / "out", kind="shards")
    assert manifest.inputs["tokenizer"] == tokenizer.fingerprint
    assert manifest.inputs["train"][0]["num_pairs"] == 20
    assert from_dict(PreprocessConfig, manifest.config) == PreprocessConfig()
    assert set(manifest.files) == {name for name in contents(tmp_path / "out") if name != "MANIFEST.json"}
    assert report.summary().startswith("20 of 20 pairs in 1 shard, ")


# --- what is refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "tgt", "message"),
    [
        (b"a\nb\nc\n", b"A\nB\n", r"a\.en has 3 lines and .*a\.de has 2"),
        (b"a\nb\n", b"A\nB\n\n", r"a\.en has 2 lines and .*a\.de has 3"),
        (b"", b"", "is empty"),
        (b"a\n\n", b"\nB\n", r"none of 2 pairs is left after filtering \(empty 2\)"),
        (gzip.compress(b"a\n" * 900, mtime=0)[:-9], b"A\n" * 900, "reading failed"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, tokenizer: Tokenizer, src: bytes, tgt: bytes, message: str) -> None:
    (tmp_path / "a.en").write_bytes(src)
    (tmp_path / "a.de").write_bytes(tgt)
    with pytest.raises(DataError, match=message):
        run(
            parse_corpus([str(tmp_path / "a.en"), str(tmp_path / "a.de")]),
            tmp_path / "new" / "out",
            tokenizer,
            config=PreprocessConfig(shard_pairs=1),
        )
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


def test_unequal_pipes_leave_nothing_behind(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """What a pipe holds is known only at its end, when shards have been written."""
    os.mkfifo(tmp_path / "a.en")
    (tmp_path / "a.de").write_bytes(b"A\n" * 50)
    corpus = parse_corpus([str(tmp_path / "a.en"), str(tmp_path / "a.de")])
    writer = threading.Thread(target=lambda: (tmp_path / "a.en").write_bytes(b"a\n" * 49))
    writer.start()
    with pytest.raises(DataError, match=r"a\.en has 49 lines and .*a\.de has 50"):
        run(corpus, tmp_path / "out", tokenizer, config=PreprocessConfig(shard_pairs=10))
    writer.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.de", "a.en"]


def test_an_empty_dev_set_is_refused(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    with pytest.raises(DataError, match="is empty, so there is no dev set"):
        run(write_corpus(make_pairs(3)), tmp_path / "out", tokenizer, held_out={"dev": write_corpus([], name="dev")})


def test_a_dev_set_without_text_is_refused(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    with pytest.raises(DataError, match="holds no pair with text on both sides, so there is no dev set"):
        run(write_corpus(make_pairs(3)), tmp_path / "out", tokenizer, held_out={"dev": write_corpus([("", "ein Wort"), ("a word", " ")], name="dev")})
    assert not (tmp_path / "out").exists()


def test_swapped_dev_files_are_refused(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    train = write_corpus(make_pairs(3))
    write_corpus(make_pairs(3), name="dev")
    with pytest.raises(UsageError, match=r"dev goes from \.de to \.en"):
        run(train, tmp_path / "out", tokenizer, held_out={"dev": parse_corpus([str(tmp_path / "dev.de"), str(tmp_path / "dev.en")])})


def test_values_out_of_range(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    with pytest.raises(ConfigError, match="shard_pairs must be at least 1, but is 0"):
        PreprocessConfig(shard_pairs=0)
    with pytest.raises(UsageError, match="the number of workers must be at least 1, but is 0"):
        run(write_corpus(make_pairs(3)), tmp_path / "out", tokenizer, num_workers=0)


def test_a_finished_output_is_left_alone(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    pairs, output = make_pairs(20), tmp_path / "out"
    held_out = {name: write_corpus(make_pairs(3, seed=seed), name=name) for seed, name in enumerate(("test", "dev"), start=8)}
    config = PreprocessConfig(filters=ALL_FILTERS)
    first = run(write_corpus(pairs), output, tokenizer, held_out=held_out, config=config)
    before = output.stat().st_mtime_ns, contents(output)
    again = run(write_corpus(pairs), output, tokenizer, held_out=held_out, config=config)
    assert (first.num_reused_shards, again.num_reused_shards) == (0, 1)
    assert repr(again).replace("num_reused_shards=1", "num_reused_shards=0") == repr(first)  # in the same order too
    assert (output.stat().st_mtime_ns, contents(output)) == before


def test_an_output_made_otherwise_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, other_tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any
) -> None:
    output, held_out = tmp_path / "out", {"dev": write_corpus(make_pairs(3), name="dev")}
    run(write_corpus(make_pairs(20)), output, tokenizer, held_out=held_out)
    before = contents(output)
    for change, message in (
        ({"config": PreprocessConfig(filters=FilterConfig(max_length=9))}, "filters.max_length: 250 -> 9"),
        ({"tokenizer": other_tokenizer}, "another tokenizer"),
        ({"held_out": {"dev": write_corpus(make_pairs(4), name="other")}}, "another held_out"),
        ({"held_out": {}}, "another held_out"),
        ({"corpus": write_corpus(make_pairs(21), name="more")}, "another train"),
    ):
        arguments: dict[str, Any] = {"corpus": parse_corpus([str(tmp_path / "train.en"), str(tmp_path / "train.de")]), **change}
        with pytest.raises(MTKitError, match=f"exists already and was made otherwise: {message}"):
            run(**{"output": output, "tokenizer": tokenizer, "held_out": held_out, **arguments})
    assert contents(output) == before


def test_an_output_that_is_something_else_is_refused(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    corpus = write_corpus(make_pairs(3))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(MTKitError, match="out: exists already and is no shard set"):
        run(corpus, tmp_path / "out", tokenizer)
    (tmp_path / "empty").mkdir()  # is nothing else
    run(corpus, tmp_path / "empty", tokenizer)
    assert ShardSet.open(tmp_path / "empty").num_pairs == 3


# --- the same bytes, whatever happens -------------------------------------------------------------------------------------------------------


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocks_module, "BLOCK_PAIRS", 16)
    patch.setattr(blocks_module, "SERIAL_BLOCKS", 1)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_do_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs, num_workers: int
) -> None:
    config = PreprocessConfig(filters=ALL_FILTERS, shard_pairs=70)
    alone = run(write_corpus(mixed_pairs), tmp_path / "alone", tokenizer, config=config)
    small_blocks(monkeypatch)
    together = run(write_corpus(mixed_pairs), tmp_path / "together", tokenizer, config=config, num_workers=num_workers)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")
    assert alone == together


@pytest.mark.parametrize(("num_workers", "stop_at"), [(1, 1), (1, 70), (1, 299), (2, 130)])
def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs, num_workers: int, stop_at: int
) -> None:
    small_blocks(monkeypatch)
    corpus, output = write_corpus(mixed_pairs), tmp_path / "out"
    config = PreprocessConfig(filters=ALL_FILTERS, shard_pairs=70)
    run(corpus, tmp_path / "clean", tokenizer, config=config)

    def stop(num_done: int) -> None:
        if num_done >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(corpus, output, tokenizer, config=config, num_workers=num_workers, progress=stop)
    assert not output.exists()
    assert not multiprocessing.active_children()
    del caught  # until here it kept all frames alive, so that no process ended by garbage collection
    progress: list[int] = []
    report = run(corpus, output, tokenizer, config=config, num_workers=num_workers, progress=progress.append)
    num_finished = stop_at // 70
    assert report.num_reused_shards == num_finished
    assert progress[0] > 70 * num_finished
    assert progress[-1] == 300
    assert contents(output) == contents(tmp_path / "clean")
    assert not partial_directory(output).exists()


@pytest.mark.parametrize("stop_at", [1, 100, 150, 299])
def test_which_pairs_are_from_which_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs, stop_at: int
) -> None:
    """Also after an interruption, with filters, and with shards that hold more than one corpus."""
    small_blocks(monkeypatch)
    parts = [mixed_pairs[:110], mixed_pairs[110:111], mixed_pairs[111:]]
    sources = [source for number, part in enumerate(parts) for source in write_corpus(part, name=f"part-{number}").sources]
    corpus = Corpus(sources=tuple(sources))
    config = PreprocessConfig(filters=ALL_FILTERS, shard_pairs=70)
    whole = run(write_corpus(mixed_pairs), tmp_path / "whole", tokenizer, config=config)

    def stop(num_done: int) -> None:
        if num_done >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "out", tokenizer, config=config, num_workers=2, progress=stop)
    report = run(corpus, tmp_path / "out", tokenizer, config=config)
    assert (report.num_pairs, report.num_read) == (whole.num_pairs, whole.num_read)
    shards = ShardSet.open(tmp_path / "out")
    alone: list[int] = []
    for number in range(len(sources)):
        seen = run(Corpus(sources=tuple(sources[: number + 1])), tmp_path / f"first-{number}", tokenizer, config=config).num_pairs
        alone.append(seen - sum(alone))
    assert shards.corpora == tuple(alone)
    assert ShardSet.open(tmp_path / "whole").corpora == (whole.num_pairs,)
    for name in ("shard-00000.src", "shard-00001.tgt", "shard-00003.src"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_interruption_while_publishing_loses_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, write_corpus: Any, mixed_pairs: Pairs
) -> None:
    def fail(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    corpus, config = write_corpus(mixed_pairs), PreprocessConfig(shard_pairs=70)
    with monkeypatch.context() as patch:
        patch.setattr("mtkit.artefacts.write_json", fail)  # the manifest
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "out", tokenizer, config=config)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "train.de", "train.en"]
    assert run(corpus, tmp_path / "out", tokenizer, config=config).num_reused_shards == 5


@pytest.mark.parametrize("change", ["config", "text", "tokenizer"])
def test_shards_of_another_job_are_not_reused(
    tmp_path: Path, tokenizer: Tokenizer, other_tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any, change: str
) -> None:
    def stop(num_done: int) -> None:
        if num_done >= 90:
            raise KeyboardInterrupt

    pairs, config = make_pairs(100), PreprocessConfig(shard_pairs=30)
    with pytest.raises(KeyboardInterrupt):
        run(write_corpus(pairs), tmp_path / "out", tokenizer, config=config, progress=stop)
    assert partial_directory(tmp_path / "out").exists()
    if change == "config":
        config = PreprocessConfig(shard_pairs=30, filters=ALL_FILTERS)
    if change == "text":
        pairs[0] = ("another", "pair")
    used = other_tokenizer if change == "tokenizer" else tokenizer
    report = run(write_corpus(pairs), tmp_path / "out", used, config=config)
    assert report.num_reused_shards == 0
    run(write_corpus(pairs), tmp_path / "clean", used, config=config)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any
) -> None:
    def link(*_arguments: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    run(write_corpus(make_pairs(20)), tmp_path / "linked", tokenizer)
    monkeypatch.setattr(os, "link", link)
    run(write_corpus(make_pairs(20)), tmp_path / "copied", tokenizer)
    assert contents(tmp_path / "copied") == contents(tmp_path / "linked")


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from mtkit.data import blocks
from mtkit.data.corpus import parse_corpus
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.tokenizer import Tokenizer

def progress(num_done):
    if num_done >= 100:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    blocks.BLOCK_PAIRS, blocks.SERIAL_BLOCKS = 16, 1
    root = Path(sys.argv[1])
    preprocess(
        parse_corpus([str(root / "train.en"), str(root / "train.de")]), held_out={}, tokenizer=Tokenizer.load(root / "tokenizer"),
        output=root / "out", config=PreprocessConfig(shard_pairs=30), num_workers=2, progress=progress,
    )
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_sigkill_leaves_no_process_and_finished_shards(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    corpus = write_corpus(make_pairs(200))
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "killed.py").write_text(KILLED)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "killed.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    workers = [int(pid) for pid in result.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in workers)
    assert not (tmp_path / "out").exists()
    config = PreprocessConfig(shard_pairs=30)
    report = run(corpus, tmp_path / "out", tokenizer, config=config)
    assert report.num_reused_shards == 3
    run(corpus, tmp_path / "clean", tokenizer, config=config)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


# --- size and real text -------------------------------------------------------------------------------------------------------------------

MEASURED = """
import resource, sys
from pathlib import Path
from mtkit.data.corpus import parse_corpus
from mtkit.data.filters import FilterConfig
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.tokenizer import Tokenizer

root = Path(sys.argv[1])
corpus = parse_corpus([str(root / "train.en"), str(root / "train.de")] * int(sys.argv[2]))
config = PreprocessConfig(shard_pairs=20_000, filters=FilterConfig(drop_duplicates=True))
preprocess(corpus, held_out={}, tokenizer=Tokenizer.load(root / "tokenizer"), output=root / sys.argv[2], config=config)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, tokenizer: Tokenizer, write_corpus: Any, make_pairs: Any) -> None:
    write_corpus(make_pairs(25_000))
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "measured.py").write_text(MEASURED)
    kilobytes = [
        int(
            subprocess.run(
                [sys.executable, str(tmp_path / "measured.py"), str(tmp_path), str(times)],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                capture_output=True,
                check=True,
            ).stdout
        )
        for times in (1, 8)
    ]
    assert kilobytes[1] < kilobytes[0] + 4096


def test_multi30k_comes_through_whole(tmp_path: Path) -> None:
    from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer

    data = shared_data("multi30k")
    train = parse_corpus([str(data / "train.en"), str(data / "train.de")])
    tokenizer = train_tokenizer((pair for _, pair in zip(range(5000), train.pairs(), strict=False)), TokenizerConfig(vocab_size=2000))
    report = run(train, tmp_path / "out", tokenizer, num_workers=2)
    assert (report.num_read, report.num_pairs, report.num_bad_utf8) == (29_000, 29_000, 0)
    shards = ShardSet.open(tmp_path / "out")
    lines = list(train.pairs())
    for index in range(0, 29_000, 1000):
        assert [shards.src(index).tolist()] == tokenizer.encode([lines[index][0]], "src")
        assert [shards.tgt(index).tolist()] == tokenizer.encode([lines[index][1]], "tgt")
