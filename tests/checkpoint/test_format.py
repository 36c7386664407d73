"""Model directories: nothing is lost on the way to disk and back, and nothing foreign gets in."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mtkit.artefacts import MANIFEST_NAME
from mtkit.checkpoint.format import (
    StoredWeights,
    check_shapes,
    describe,
    load_model,
    parameters_by_name,
    read_description,
    read_tensors,
    save_model,
)
from mtkit.checkpoint.layout import CARD_NAME, MODEL_NAME, read_tensor_header
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.errors import ArtefactError, MTKitError, ResourceError
from mtkit.model.transformer import Transformer
from tests.decoding.builders import random_model, save, tiny_tokenizer
from tests.helpers import refresh_manifest


@pytest.fixture
def saved(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> Path:
    directory = tmp_path / "model"
    save_model(directory, tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={"step": 7}), tokenizer=tokenizer)
    return directory


def edit_json(path: Path, **changes: object) -> None:
    """Change a file as an attacker would: with a manifest that agrees."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))
    refresh_manifest(path)


def test_round_trip_is_exact(saved: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    loaded = load_model(saved)
    for name, tensor in parameters_by_name(model).items():
        torch.testing.assert_close(parameters_by_name(loaded.model)[name], tensor, rtol=0, atol=0)
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.description.provenance == {"step": 7}
    assert loaded.model.config == model.config
    assert not loaded.model.training
    src_BS = torch.tensor([[5, 6, 3]])
    mask = torch.ones_like(src_BS, dtype=torch.bool)
    torch.testing.assert_close(loaded.model(src_BS, mask, src_BS), model.eval()(src_BS, mask, src_BS), rtol=0, atol=0)


def test_saving_leaves_the_model_alone(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    before = {name: tensor.clone() for name, tensor in parameters_by_name(model).items()}
    save_model(tmp_path / "m", tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={}), tokenizer=tokenizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters_by_name(model).items())


def test_a_tied_parameter_is_stored_once_under_a_model_name(saved: Path, model: Transformer) -> None:
    with safe_open(saved / MODEL_NAME, "pt") as file:
        names = set(file.keys())
    assert names == {name for name, _ in model.named_parameters()}
    assert sum(tensor.numel() for tensor in load_file(saved / MODEL_NAME).values()) == model.num_parameters()
    loaded = load_model(saved).model
    assert loaded.src_weight.data_ptr() == loaded.tgt_weight.data_ptr() == loaded.output_weight.data_ptr()


def test_files_obey_the_umask(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    old = os.umask(0o027)
    try:
        save_model(tmp_path / "m", tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={}), tokenizer=tokenizer)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").rglob("*") if path.is_file()} == {0o640}


def test_an_existing_directory_is_not_replaced_unasked(saved: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    description = describe(model, tokenizer, provenance={"step": 8})
    with pytest.raises(MTKitError, match="exists already"):
        save_model(saved, tensors=parameters_by_name(model), description=description, tokenizer=tokenizer)
    save_model(saved, tensors=parameters_by_name(model), description=description, tokenizer=tokenizer, overwrite=True)
    assert load_model(saved).description.provenance == {"step": 8}
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model"]


def test_a_flipped_bit_is_found(saved: Path) -> None:
    data = bytearray((saved / MODEL_NAME).read_bytes())
    data[len(data) // 2] ^= 4
    (saved / MODEL_NAME).write_bytes(bytes(data))
    with pytest.raises(ArtefactError, match=r"model\.safetensors: its sha256 differs"):
        load_model(saved)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_cut_file_is_found(saved: Path, keep: int) -> None:
    data = (saved / MODEL_NAME).read_bytes()
    (saved / MODEL_NAME).write_bytes(data[:keep])
    with pytest.raises(ArtefactError, match=r"model\.safetensors: has \d+ bytes"):
        load_model(saved)
    refresh_manifest(saved / MODEL_NAME)
    with pytest.raises(ArtefactError, match=r"model\.safetensors"):
        load_model(saved)


@pytest.mark.parametrize("name", [MODEL_NAME, "config.json", "tokenizer/tokenizer.model"])
def test_a_missing_file_is_found(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ArtefactError, match="is missing"):
        load_model(saved)


@pytest.mark.parametrize("name", ["config.json", "tokenizer/tokenizer.model", "tokenizer/tokenizer.json"])
def test_a_changed_file_is_found(saved: Path, name: str) -> None:
    """Also where what it says now is possible, such as another number of heads: the model would write nonsense."""
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data.replace(b"2", b"4", 1))
    assert (saved / name).read_bytes() != data
    with pytest.raises(ArtefactError, match=f"{name}: its sha256 differs"):
        load_model(saved)


def test_what_a_model_does_not_consist_of_may_change(saved: Path) -> None:
    (saved / CARD_NAME).write_text("# My model")
    load_model(saved)


def test_weights_of_another_shape_are_refused_by_name_before_they_are_read(saved: Path) -> None:
    edit_json(saved / "config.json", model={**json.loads((saved / "config.json").read_text())["model"], "ffn_dim": 32})
    with pytest.raises(ArtefactError, match=r"has the shape \[24.*\], and \[32"):
        load_model(saved)


def test_a_config_that_asks_for_more_than_the_file_holds_does_not_eat_memory(saved: Path) -> None:
    model = json.loads((saved / "config.json").read_text())["model"]
    edit_json(saved / "config.json", model={**model, "d_model": 1 << 20, "ffn_dim": 1 << 22})
    with pytest.raises(ArtefactError, match="has the shape"):
        load_model(saved)
    edit_json(saved / "config.json", model={**model, "num_encoder_layers": 10**9})
    with pytest.raises(ArtefactError, match="layers"):
        load_model(saved)


def test_a_size_that_overflows_is_refused(saved: Path) -> None:
    model = json.loads((saved / "config.json").read_text())["model"]
    for key, value in (("ffn_dim", 1 << 70), ("d_model", 1 << 40)):
        edit_json(saved / "config.json", model={**model, key: value})
        with pytest.raises(ArtefactError, match=f"{key} must be (at most 16777216|a whole number), but is {value}"):
            load_model(saved)
    edit_json(saved / "config.json", model=model, src_vocab_size=1 << 61)
    with pytest.raises(ArtefactError, match="src_vocab_size is"):
        load_model(saved)


def test_weights_of_another_type_are_refused_by_name(saved: Path) -> None:
    tensors = {name: tensor.double() for name, tensor in load_file(saved / "model.safetensors").items()}
    save_file(tensors, saved / "model.safetensors")
    refresh_manifest(saved / "model.safetensors")
    with pytest.raises(ArtefactError, match="has the type 'F64', and F32 is needed"):
        load_model(saved)


def test_an_unknown_config_key_is_refused(saved: Path) -> None:
    edit_json(saved / "config.json", model={"d_modl": 16})
    with pytest.raises(ArtefactError, match="unknown key d_modl"):
        load_model(saved)


def test_another_tokenizer_is_refused(saved: Path, tmp_path: Path) -> None:
    other = train_tokenizer(((f"wort {index} ist neu", "neu ist es") for index in range(50)), TokenizerConfig(vocab_size=30, byte_fallback=False))
    for name in ("tokenizer.model", "tokenizer.json"):
        (saved / "tokenizer" / name).unlink()
    (saved / "tokenizer").rmdir()
    (saved / "tokenizer").mkdir()
    other.write_files(saved / "tokenizer")
    manifest = json.loads((saved / MANIFEST_NAME).read_text())
    manifest["files"] = {name: record for name, record in manifest["files"].items() if not name.startswith("tokenizer/")}
    (saved / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match="its tokenizer has the fingerprint"):
        load_model(saved)


def test_a_run_directory_stands_for_its_model_or_its_newest_checkpoint(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    saved.rename(run / "model")
    assert load_model(run).path == run / "model"


@pytest.mark.parametrize(("name", "message"), [("nothing", "does not exist"), (".", "holds no model")])
def test_no_model_there(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ArtefactError, match=message) as error:
        load_model(tmp_path / name)
    assert "mtkit train" in (error.value.hint or "")


def test_shapes_are_compared_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, tmp_path / "x.safetensors")
    check_shapes(tmp_path / "x.safetensors", {"a": torch.Size((2, 3)), "b": torch.Size((1,))})
    with pytest.raises(ArtefactError, match="has no tensor c"):
        check_shapes(tmp_path / "x.safetensors", {"a": torch.Size((2, 3)), "b": torch.Size((1,)), "c": torch.Size((1,))})
    with pytest.raises(ArtefactError, match="holds a tensor that the model lacks: 'b'"):
        check_shapes(tmp_path / "x.safetensors", {"a": torch.Size((2, 3))})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (20).to_bytes(8, "little") + b'{"a":{"shape":[-1]}}',
        (2).to_bytes(8, "little") + b'"a"',
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ArtefactError, match=r"x\.safetensors"):
        read_tensor_header(tmp_path / "x.safetensors")
    with pytest.raises(ArtefactError, match=r"x\.safetensors"):
        read_tensors(tmp_path / "x.safetensors")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Transformer, tokenizer: Tokenizer) -> None:
    from safetensors import SafetensorError

    import mtkit.checkpoint.format as module

    def full(*_arguments: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ResourceError, match="No space left"):
        save_model(tmp_path / "m", tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={}), tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_of_one_file_whatever_becomes_of_its_name(tmp_path: Path) -> None:
    first = save(tmp_path / "model", random_model(4), tiny_tokenizer())
    second = save(tmp_path / "other", random_model(5), tiny_tokenizer())
    weights = StoredWeights(first / MODEL_NAME, read_description(first))
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    (second / MODEL_NAME).rename(first / MODEL_NAME)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    (first / MODEL_NAME).unlink()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert set(weights) == set(dict(random_model(4).named_parameters()))
    with pytest.raises(KeyError):
        weights["nothing"]


@pytest.mark.parametrize("offsets", [(0, 4), (10**9, 10**9 + 40_000), (-8, 39_992)])
def test_weights_that_are_not_where_the_header_says_are_refused(tmp_path: Path, offsets: tuple[int, int]) -> None:
    directory = save(tmp_path / "model", random_model(4), tiny_tokenizer())
    weights = StoredWeights(directory / MODEL_NAME, read_description(directory))
    weights._header["src_embedding.weight"]["data_offsets"] = offsets
    with pytest.raises(ArtefactError, match=r"is damaged: src_embedding.weight is not where the header says"):
        weights["src_embedding.weight"]
