"""Weights in fewer bits: how near they are, how small, and that a model of them is a model like any other."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from mtkit.checkpoint.format import StoredWeights, load_model, read_description, save_narrow_model
from mtkit.checkpoint.layout import MODEL_NAME, SCALE_SUFFIX
from mtkit.checkpoint.narrow import StoredPrecision, narrow, stored_shapes, widen
from mtkit.errors import ArtefactError, MTKitError
from mtkit.files import read_json, write_json
from tests.decoding.builders import random_model, save, tiny_tokenizer


@pytest.mark.parametrize(("precision", "error", "share"), [("fp32", 0.0, 1.0), ("bf16", 4e-3, 0.5), ("fp16", 5e-4, 0.5), ("int8", 5e-3, 0.27)])
def test_tensors_come_back_near(precision: StoredPrecision, error: float, share: float) -> None:
    torch.manual_seed(0)
    tensors = {"weight": torch.randn(40, 256) * torch.logspace(-4, 2, 40)[:, None], "bias": torch.randn(40)}
    tensors["weight"][3] = 0.0
    stored = narrow(tensors, precision)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    assert {name: tensor.shape for name, tensor in stored.items()} == stored_shapes(shapes, precision)
    found = widen(stored)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == torch.float32
        # Of each row: rounding goes by its largest number.
        largest = tensor.abs().amax(dim=-1, keepdim=True)
        assert bool(((found[name] - tensor).abs() <= error * largest + 1e-12).all())
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    assert size <= share * sum(tensor.numel() * 4 for tensor in tensors.values()) + 40 * 4


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_a_narrow_model_is_a_model(tmp_path: Path, precision: StoredPrecision) -> None:
    original = load_model(save(tmp_path / "model", random_model(4), tiny_tokenizer()))
    save_narrow_model(original, tmp_path / "narrow", precision=precision)
    loaded = load_model(tmp_path / "narrow")
    assert loaded.description.precision == precision
    for (name, found), expected in zip(loaded.model.named_parameters(), original.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02, msg=name)
    size, full = ((tmp_path / name / MODEL_NAME).stat().st_size for name in ("narrow", "model"))
    assert size < (0.5 if precision == "int8" else 0.7) * full  # of a model of few, short rows
    save_narrow_model(loaded, tmp_path / "again", precision=precision)
    for found, expected in zip(load_model(tmp_path / "again").model.parameters(), loaded.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(MTKitError, match="exists"):
        save_narrow_model(original, tmp_path / "narrow", precision=precision)


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    original = load_model(save(tmp_path / "model", random_model(4), tiny_tokenizer()))
    broken = copy.deepcopy(original.model)
    with torch.no_grad():
        next(broken.parameters()).fill_(1e6)
    original.model.load_state_dict(broken.state_dict())
    with pytest.raises(MTKitError, match=r"cannot be stored in fp16: .* beyond the range of fp16"):
        save_narrow_model(original, tmp_path / "narrow", precision="fp16")
    assert not (tmp_path / "narrow").exists()


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", random_model(4), tiny_tokenizer())
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", {**config, "precision": "int3"})
    with pytest.raises(ArtefactError, match="has weights in 'int3', this mtkit reads fp32, fp16, bf16, int8"):
        read_description(directory)


def test_a_file_without_the_scales_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", random_model(4), tiny_tokenizer())
    description = dataclasses.replace(read_description(directory), precision="int8")
    with pytest.raises(ArtefactError, match=f"has no tensor .*{SCALE_SUFFIX}|has the type 'F32', and I8 is needed"):
        StoredWeights(directory / MODEL_NAME, description)
