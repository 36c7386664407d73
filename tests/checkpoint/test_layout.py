import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtkit.artefacts import atomic_directory
from mtkit.checkpoint.layout import find_model, find_tokenizer, load_tokenizer, read_tensor_header
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError


def test_names_types_and_shapes_are_read_without_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros((2, 3), dtype=np.float32), "b": np.zeros((), dtype=np.float16)}, path, metadata={"format": "pt"})
    header = read_tensor_header(path)
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {"a": ("F32", [2, 3]), "b": ("F16", [])}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1234567", id="shorter than the length"),
        pytest.param(struct.pack("<Q", 1 << 60) + b"{}", id="length beyond the file"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="not an object"),
        pytest.param(struct.pack("<Q", 3) + b"{x}", id="not json"),
        pytest.param(struct.pack("<Q", 7) + b'{"a":1}', id="entry is a number"),
        pytest.param(struct.pack("<Q", 21) + b'{"a": {"shape":[-1]}}', id="negative length"),
        *(
            pytest.param(struct.pack("<Q", len(entry)) + entry, id=f"offsets {offsets}")
            for offsets in ("null", "[0, null]", "[0.5, 4]", '["0", "4"]')
            for entry in [f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": {offsets}}}}}'.encode()]
        ),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match="x.safetensors: is "):
        read_tensor_header(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="cannot be read"):
        read_tensor_header(tmp_path / "x.safetensors")


def seal(directory: Path, kind: str, tokenizer: Tokenizer | None) -> None:
    """An artefact that holds a tokenizer, or none."""
    with atomic_directory(directory, kind=kind) as temporary:
        (temporary / "x").touch()
        if tokenizer is not None:
            (temporary / "tokenizer").mkdir()
            tokenizer.write_files(temporary / "tokenizer")


@pytest.mark.parametrize("place", ["model", "checkpoints/step-0000007", "data/tokenizer", "data/shards"])
def test_the_tokenizer_of_a_run_is_found_in_whatever_it_has(place: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    if place == "data/tokenizer":
        tokenizer.save(tmp_path / "run" / place)
    else:
        seal(tmp_path / "run" / place, "shards" if place == "data/shards" else "model", tokenizer)
    (tmp_path / "run" / "checkpoints" / "step-0000009").mkdir(parents=True)  # half-written
    assert find_tokenizer(tmp_path / "run") == tmp_path / "run" / place
    assert load_tokenizer(tmp_path / "run").fingerprint == tokenizer.fingerprint


def test_a_run_without_a_model_stands_for_its_checkpoint_of_the_highest_step(tmp_path: Path) -> None:
    for name in ("step-9999999", "step-10000000", "step-10000000.bak", "step-last"):
        seal(tmp_path / "run" / "checkpoints" / name, "checkpoint", None)
    assert find_model(tmp_path / "run").name == "step-10000000"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-10000000")
    assert find_model(tmp_path / "run").name == "step-9999999"


@pytest.mark.parametrize(
    ("records", "name"),
    [
        (None, "model"),
        (b'{"kind": "valid", "step": 7}\n{"kind": "end", "step": 7}\n', "model"),
        (b'{"kind": "end", "step": 7}\n{"kind": "tr', "model"),
        (b'{"kind": "valid", "step": 7}\n{"kind": "start", "step": 7}\n{"kind": "tr', "step-0000009"),
        (b"\n" + b"x" * 100_000, "model"),
        (b'{"kind": "start", "step": 7}\n' + b"[" * 10_000, "step-0000009"),
    ],
)
def test_a_run_that_goes_on_stands_for_its_latest_checkpoint_again(records: bytes | None, name: str, tmp_path: Path) -> None:
    seal(tmp_path / "run" / "model", "model", None)
    if records is not None:
        (tmp_path / "run" / "metrics.jsonl").write_bytes(records)
    assert find_model(tmp_path / "run").name == "model"
    seal(tmp_path / "run" / "checkpoints" / "step-0000009", "checkpoint", None)
    assert find_model(tmp_path / "run").name == name


def test_the_tokenizer_of_an_artefact_is_found_by_either_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    seal(tmp_path / "model", "model", tokenizer)
    for path in ("tokenizer", "model", "model/tokenizer"):
        assert load_tokenizer(tmp_path / path).fingerprint == tokenizer.fingerprint


def test_where_a_tokenizer_was_looked_for_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, reason in (("file", "it is no directory$"), ("missing", "it does not exist$"), ("empty", "it has no MANIFEST.json, as ")):
        with pytest.raises(ArtefactError) as caught:
            load_tokenizer(tmp_path / name)
        assert re.search(f"{name}: is not a tokenizer and holds none: {reason}", caught.value.message)
        parts = ("model/", "checkpoints/step-*/", "data/tokenizer/", "data/shards/")
        assert all((part in caught.value.message) == (name == "empty") for part in parts)
    seal(tmp_path / "other", "model", None)
    with pytest.raises(ArtefactError, match="other: is a model, and a tokenizer is needed here"):
        load_tokenizer(tmp_path / "other")
