import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.artefacts import MANIFEST_NAME, seal_directory
from mtkit.data.preprocess import PreprocessConfig, preprocess
from mtkit.data.shards import ShardSet
from mtkit.data.token_file import HEADER_SIZE, TokenFile
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, ResourceError

NUM_PAIRS = 25


@pytest.fixture
def directory(tmp_path: Path, tokenizer: Tokenizer, make_pairs: Any, write_corpus: Any) -> Path:
    """A shard set of 25 pairs in 3 shards with a dev set."""
    preprocess(
        write_corpus(make_pairs(NUM_PAIRS)),
        held_out={"dev": write_corpus([("Hello … ", "\u201eHallo\u201c"), ("", "leer"), ("x\u2028y", "é")], name="dev")},
        tokenizer=tokenizer,
        output=tmp_path / "shards",
        config=PreprocessConfig(shard_pairs=10),
    )
    return tmp_path / "shards"


def test_pairs_come_back_across_shards(directory: Path, tokenizer: Tokenizer, make_pairs: Any) -> None:
    shards = ShardSet.open(directory)
    pairs = make_pairs(NUM_PAIRS)
    assert shards.num_pairs == NUM_PAIRS
    assert tokenizer.decode([shards.src(index) for index in range(NUM_PAIRS)], "src") == [src for src, _ in pairs]  # type: ignore[misc]
    assert [shards.tgt(index).tolist() for index in range(NUM_PAIRS)] == tokenizer.encode([tgt for _, tgt in pairs], "tgt")
    assert shards.src_lengths.tolist() == [len(shards.src(index)) for index in range(NUM_PAIRS)]
    assert shards.tgt_lengths.tolist() == [len(shards.tgt(index)) for index in range(NUM_PAIRS)]
    assert shards.src(0).dtype == np.uint16
    for index in (-1, NUM_PAIRS):
        with pytest.raises(IndexError):
            shards.src(index)


def test_held_out_text_is_raw(directory: Path) -> None:
    shards = ShardSet.open(directory)
    assert shards.held_out_names == ("dev",)
    assert shards.held_out("dev") == (["Hello … ", "", "x\u2028y"], ["\u201eHallo\u201c", "leer", "é"])
    with pytest.raises(ArtefactError, match="holds no set named 'test'") as caught:
        shards.held_out("test")
    assert caught.value.hint == "It holds: dev"


def test_the_tokenizer_is_bundled_byte_for_byte(directory: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    for name in ("tokenizer.model", "tokenizer.json"):
        assert (directory / "tokenizer" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    assert ShardSet.open(directory).tokenizer.fingerprint == tokenizer.fingerprint


def test_an_exchanged_tokenizer_is_found_even_under_a_valid_manifest(directory: Path, other_tokenizer: Tokenizer) -> None:
    shutil.rmtree(directory / "tokenizer")
    (directory / "tokenizer").mkdir()
    other_tokenizer.write_files(directory / "tokenizer")
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=other_tokenizer.fingerprint):
        ShardSet.open(directory)


def test_exchanged_shards_are_found_even_under_a_valid_manifest(directory: Path) -> None:
    shutil.copy(directory / "shard-00002.src", directory / "shard-00001.src")
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=r"shard-00001\.src: has 5 rows .* says 10"):
        ShardSet.open(directory)


def test_each_shard_is_checked_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(TokenFile, "check_ids", lambda self: checked.append(self.path.name))
    shards = ShardSet.open(directory)
    for index in (3, 3, 24, 4):
        shards.src(index)
        shards.tgt(index)
    assert checked == ["shard-00000.src", "shard-00000.tgt", "shard-00002.src", "shard-00002.tgt"]


def test_damaged_ids_are_found_when_first_touched_and_only_there(directory: Path) -> None:
    path = directory / "shard-00001.tgt"
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE + 4] ^= 1
    path.write_bytes(data)
    shards = ShardSet.open(directory)
    assert len(shards.tgt(9)) == shards.tgt_lengths[9]
    for _ in range(2):  # and again
        with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: the ids in bytes 64 to \d+"):
            shards.src(10)
    with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: its sha256 differs"):
        ShardSet.open(directory, verify="full")


@pytest.mark.parametrize(
    "name", ["shard-00000.src", "shard-00002.tgt", "held_out/dev.src", "tokenizer/tokenizer.model", "shards.json", MANIFEST_NAME]
)
@pytest.mark.parametrize("change", ["missing", "cut"])
def test_missing_and_cut_files_are_named(directory: Path, name: str, change: str) -> None:
    path = directory / name
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        if name == MANIFEST_NAME:
            path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    with pytest.raises(ArtefactError, match=name):
        ShardSet.open(directory)


@pytest.mark.parametrize(("key", "value", "message"), [("format", 2, "has format 2"), ("shards", 3, "shards must be"), ("extra", 1, "unknown key")])
def test_other_metadata_is_refused(directory: Path, key: str, value: object, message: str) -> None:
    path = directory / "shards.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), key: value}))
    seal_directory(directory, kind="shards", config={}, inputs={})
    with pytest.raises(ArtefactError, match=rf"shards\.json: {message}"):
        ShardSet.open(directory)


def test_fingerprint_is_that_of_the_content(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    assert ShardSet.open(tmp_path / "copy").fingerprint == ShardSet.open(directory).fingerprint


# --- sets that are not read as a whole --------------------------------------------------------------------------------------------------


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.shards.CHECKED_BYTES", 0)


def test_pairs_are_gathered_in_the_order_asked_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([24, 3, 3, 10, 9, 0, 19])
    gathered = {}
    for limit in (1 << 20, 0):
        monkeypatch.setattr("mtkit.data.shards.CHECKED_BYTES", limit)
        shards = ShardSet.open(directory)
        (src_ids, src_offsets), (tgt_ids, tgt_offsets) = gathered[limit] = shards.gather(numbers)
        for place, number in enumerate(numbers.tolist()):
            assert src_ids[src_offsets[place] : src_offsets[place + 1]].tolist() == shards.src(number).tolist()
            assert tgt_ids[tgt_offsets[place] : tgt_offsets[place + 1]].tolist() == shards.tgt(number).tolist()
        assert [len(part) for part in shards.gather(numbers[:0])[0]] == [0, 1]
        for wrong in (-1, NUM_PAIRS):
            with pytest.raises(IndexError):
                shards.gather(np.array([wrong]))


@pytest.mark.usefixtures("all_are_large")
def test_a_large_set_is_not_read_as_a_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("reads all of a file")

    monkeypatch.setattr(TokenFile, "check_ids", refuse)
    monkeypatch.setattr(TokenFile, "lengths", property(refuse))
    monkeypatch.setattr("mtkit.data.token_file.np.diff", refuse)
    shards = ShardSet.open(directory)
    shards.gather(np.arange(0, NUM_PAIRS, 3))
    assert len(shards.src(4)) > 0


@pytest.mark.usefixtures("all_are_large")
def test_damage_to_a_pair_of_a_large_set_is_found_when_it_is_read(directory: Path) -> None:
    path = directory / "shard-00001.tgt"
    data = bytearray(path.read_bytes())
    data[HEADER_SIZE + 1] ^= 0x80  # the high byte of the first id
    path.write_bytes(data)
    shards = ShardSet.open(directory)
    shards.gather(np.array([9, 11]))
    for read in (lambda: shards.gather(np.array([9, 10])), lambda: shards.tgt(10)):
        with pytest.raises(ArtefactError, match=rf"shard-00001\.tgt: row 0, whose ids begin at byte {HEADER_SIZE}, has the id"):
            read()
    with pytest.raises(ArtefactError, match=r"shard-00001\.tgt: its sha256 differs"):
        ShardSet.open(directory, verify="full")


def test_the_longest_pair(directory: Path) -> None:
    shards = ShardSet.open(directory)
    assert shards.max_lengths() == (shards.src_lengths.max(), shards.tgt_lengths.max())


def test_as_many_files_may_be_open_as_there_are_shards(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, asked = [300, 400], []
    monkeypatch.setattr("mtkit.data.shards.resource.getrlimit", lambda _which: tuple(limits))
    monkeypatch.setattr("mtkit.data.shards.resource.setrlimit", lambda _which, values: asked.append(values))
    ShardSet.open(directory)
    assert asked == []
    limits[0] = 261
    ShardSet.open(directory)
    assert asked == [(262, 400)]
    limits[1] = 261
    ShardSet.open(directory)
    assert asked == [(262, 400)], "as far as it may be"


def test_too_many_open_files_are_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("mtkit.data.token_file.mmap.mmap", refuse)
    with pytest.raises(ResourceError, match=r"shard-00000.src: cannot be opened, for this process has as many files open as it may have") as error:
        ShardSet.open(directory)
    assert "ulimit -n" in (error.value.hint or "")
