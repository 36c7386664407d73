"""Files from a stranger: whatever is in them, reading them works or ends in an error for users; nothing is run, no file elsewhere is touched.

What single readers refuse, and in which words, is in their own tests. Here files are changed at random, with manifests that fit.
"""

import contextlib
import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtkit import config as codec
from mtkit.artefacts import MANIFEST_NAME, seal_directory
from mtkit.checkpoint.format import load_model, save_model
from mtkit.checkpoint.manager import list_checkpoints
from mtkit.data.shards import ShardSet
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, MTKitError
from mtkit.files import sha256_file
from mtkit.training.config import TrainConfig
from mtkit.training.state import read_state
from tests.e2e.toy import Pipeline
from tests.helpers import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.reliability]
FUZZ = settings(max_examples=2000 if "MTKIT_NIGHTLY" in os.environ else 150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

Change = Callable[[bytes], bytes]


def flip(data: bytes, places: list[float], values: bytes) -> bytes:
    changed = bytearray(data)
    for place, value in zip(places, values, strict=False):
        if changed:
            changed[int(place * (len(changed) - 1))] = value
    return bytes(changed)


def insert(data: bytes, place: float, junk: bytes) -> bytes:
    at = int(place * len(data))
    return data[:at] + junk + data[at:]


PLACE = st.floats(0, 1)
CHANGE = st.one_of(
    st.builds(lambda places, values: lambda data: flip(data, places, values), st.lists(PLACE, max_size=5), st.binary(min_size=5, max_size=5)),
    PLACE.map(lambda part: lambda data: data[: int(part * len(data))]),
    st.builds(lambda place, junk: lambda data: insert(data, place, junk), PLACE, st.binary(max_size=20)),
    st.binary(max_size=200).map(lambda junk: lambda _data: junk),
    st.integers(0, 2**64 - 1).map(lambda size: lambda data: struct.pack("<Q", size) + data[8:]),
)

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 10**6, 2**31, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(["../../../etc/passwd", "/etc/passwd", "~", "$HOME", "a\x00b", "\x1b[2J", "F64", "BF16"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, part in inner for found in places_in(part, (*place, key)))]


def change_json(data: bytes, where: float, leaf: object) -> bytes:
    value = json.loads(data)
    places = places_in(value)[1:]
    *path, last = places[int(where * (len(places) - 1))]
    part = value
    for key in path:
        part = part[key]
    part[last] = leaf
    return json.dumps(value).encode()


JSON_CHANGE = st.builds(lambda where, leaf: lambda data: change_json(data, where, leaf), st.floats(0, 1), LEAF)


def copy_with(source: Path, target: Path, name: str, change: Change) -> None:
    """Copy an artefact with one file changed and a manifest that fits, as one who means harm would make it."""
    manifest = json.loads((source / MANIFEST_NAME).read_bytes())
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
            continue
        copy.unlink(missing_ok=True)
        if path.relative_to(source).as_posix() == name:
            copy.write_bytes(change(path.read_bytes()))
        elif path.name != MANIFEST_NAME:
            os.link(path, copy)
    meta = target / "tokenizer" / "tokenizer.json"
    if name == "tokenizer/tokenizer.model":
        value = json.loads(meta.read_bytes())
        value["models"]["tokenizer.model"]["sha256"] = sha256_file(target / name)
        meta.unlink()
        meta.write_bytes(json.dumps(value).encode())
    seal_directory(target, kind=manifest["kind"], config=manifest["config"], inputs=manifest["inputs"])


def read_whole_set(path: Path) -> None:
    shards = ShardSet.open(path)
    for index in range(0, shards.num_pairs, 97):
        shards.src(index)
        shards.tgt(index)
    for name in shards.held_out_names:
        shards.held_out(name)


@pytest.fixture(scope="module")
def model(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the tokenizer of the shared run."""
    import torch

    from mtkit.checkpoint.format import describe, parameters_by_name
    from mtkit.model.config import ModelConfig
    from mtkit.model.transformer import Transformer

    tokenizer = Tokenizer.load(pipeline.tokenizer)
    torch.manual_seed(1)
    config = ModelConfig(d_model=8, ffn_dim=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    small = Transformer(config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    path = tmp_path_factory.mktemp("hostile") / "model"
    save_model(path, tensors=parameters_by_name(small), description=describe(small, tokenizer, provenance={}), tokenizer=tokenizer)
    return path


@given(name=st.sampled_from(["model.safetensors", "config.json", "tokenizer/tokenizer.json"]), change=CHANGE)
@FUZZ
def test_a_model_directory_with_changed_bytes(model: Path, tmp_path: Path, name: str, change: Change) -> None:
    """F4."""
    copy_with(model, tmp_path / "copy", name, change)
    read_or_refuse(lambda: load_model(tmp_path / "copy"))


@given(name=st.sampled_from(["config.json", "tokenizer/tokenizer.json"]), change=JSON_CHANGE)
@FUZZ
def test_a_model_directory_with_other_values(model: Path, tmp_path: Path, name: str, change: Change) -> None:
    """F4, F5: sizes that nobody has memory for, paths, types."""
    copy_with(model, tmp_path / "copy", name, change)
    with limited_memory():
        read_or_refuse(lambda: load_model(tmp_path / "copy"))


@given(change=st.one_of(CHANGE, JSON_CHANGE))
@FUZZ
def test_a_manifest_with_changes(model: Path, tmp_path: Path, change: Change) -> None:
    copy_with(model, tmp_path / "copy", "", lambda data: data)
    path = tmp_path / "copy" / MANIFEST_NAME
    path.write_bytes(change(path.read_bytes()))
    read_or_refuse(lambda: load_model(tmp_path / "copy"))


@given(where=st.floats(0, 1), leaf=LEAF)
@FUZZ
def test_a_header_that_lies(model: Path, tmp_path: Path, where: float, leaf: object) -> None:
    """F4: names, types, shapes and offsets of tensors."""

    def change(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        header = change_json(data[8 : 8 + size], where, leaf)
        return struct.pack("<Q", len(header)) + header + data[8 + size :]

    copy_with(model, tmp_path / "copy", "model.safetensors", change)
    with limited_memory():
        read_or_refuse(lambda: load_model(tmp_path / "copy"))


@given(data=st.data())
@FUZZ
def test_a_shard_set_with_changed_bytes(pipeline: Pipeline, tmp_path: Path, data: st.DataObject) -> None:
    """F4, B1."""
    names = sorted(path.relative_to(pipeline.shards).as_posix() for path in pipeline.shards.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from([name for name in names if name != MANIFEST_NAME and not name.endswith(".model")]))
    change = data.draw(st.one_of(CHANGE, JSON_CHANGE) if name.endswith(".json") else CHANGE)
    copy_with(pipeline.shards, tmp_path / "copy", name, change)
    with limited_memory():
        read_or_refuse(lambda: read_whole_set(tmp_path / "copy"))


@given(change=st.one_of(CHANGE, JSON_CHANGE))
@FUZZ
def test_the_state_of_a_run_with_changes(pipeline: Pipeline, tmp_path: Path, change: Change) -> None:
    """F4: a checkpoint that cannot be read is none; it does not stop those that can."""
    checkpoint = list_checkpoints(pipeline.run / "checkpoints")[-1].path
    (tmp_path / "step-0000001").mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.is_file() and path.name in (MANIFEST_NAME, "state.json"):
            data = path.read_bytes()
            (tmp_path / "step-0000001" / path.name).write_bytes(change(data) if path.name == "state.json" else data)
    list_checkpoints(tmp_path)
    read_or_refuse(lambda: read_state(tmp_path / "step-0000001"))


@given(change=CHANGE)
@FUZZ
def test_a_config_with_changed_bytes(tmp_path: Path, change: Change) -> None:
    text = codec.dump_toml(codec.from_dict(TrainConfig, {"data": {"shards": "x"}})).encode()
    (tmp_path / "config.toml").write_bytes(change(text))
    read_or_refuse(lambda: codec.from_dict(TrainConfig, codec.read_config(tmp_path / "config.toml")))


def read_or_refuse(read: Callable[[], object]) -> None:
    """Anything but an error for users fails the test."""
    with contextlib.suppress(MTKitError):
        read()


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """A block that may take half a GB more than the process has now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


TOKENIZERS_SCRIPT = """
import random, sys
from pathlib import Path
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, TrainingText
from mtkit.errors import ArtefactError

model = Path(sys.argv[1]).read_bytes()
first, count = int(sys.argv[2]), int(sys.argv[3])
text = {"tokenizer.model": TrainingText(num_lines=1, num_sentences=1, sha256="")}
for seed in range(first, first + count):
    rng = random.Random(seed)
    changed = bytearray(model)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(3)
        place = rng.randrange(len(changed)) if rng.random() < 0.5 else max(0, len(changed) - rng.randrange(1, 600))
        if kind == 0:
            changed[place] = rng.randrange(256)
        elif kind == 1:
            del changed[place:place + rng.randint(1, 30)]
        else:
            changed[place:place] = rng.randbytes(rng.randint(1, 9))
    print(seed, flush=True)
    try:
        tokenizer = Tokenizer(TokenizerConfig(), {"tokenizer.model": bytes(changed)}, trained_on=text)
        rows = tokenizer.encode(["one two three", "f\\u00fcnf \\U0001f600", ""], "src")
        tokenizer.decode(rows, "tgt")
        tokenizer.forbidden_ids("tgt")
    except (ArtefactError, RuntimeError, ValueError, TypeError):
        pass
print("done", flush=True)
"""


def test_a_sentencepiece_model_with_changes_ends_no_process(pipeline: Pipeline) -> None:
    """F4: its own parser is foreign code, so this runs in a child, which must come to its end."""
    model = pipeline.tokenizer / "tokenizer.model"
    count = 20_000 if "MTKIT_NIGHTLY" in os.environ else 1500
    result = subprocess.run(
        [sys.executable, "-c", TOKENIZERS_SCRIPT, str(model), "0", str(count)],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=280,
    )
    lines = result.stdout.decode().split("\n")
    assert lines[-2:] == ["done", ""], (result.returncode, lines[-3:], result.stderr.decode()[-2000:])


@pytest.mark.parametrize("key", ["name", "held_out"])
def test_a_shard_set_cannot_name_files_elsewhere(pipeline: Pipeline, tmp_path: Path, key: str) -> None:
    """F5."""

    def change(data: bytes) -> bytes:
        value = json.loads(data)
        if key == "name":
            value["shards"][0]["name"] = "../elsewhere"
        else:
            value["held_out"] = ["../elsewhere"]
        return json.dumps(value).encode()

    for side in ("src", "tgt"):
        os.link(pipeline.shards / f"shard-00000.{side}", tmp_path / f"elsewhere.{side}")
    copy_with(pipeline.shards, tmp_path / "copy", "shards.json", change)
    with pytest.raises(ArtefactError, match="which the manifest does not list"):
        read_whole_set(tmp_path / "copy")
