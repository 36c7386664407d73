"""Which precision and how many threads a model gets, and which models may translate together."""

from pathlib import Path

import pytest
import torch

from mtkit.decoding import loading
from mtkit.decoding.loading import load_models, load_translator
from mtkit.decoding.quantize import Int8Linear
from mtkit.decoding.translator import SearchConfig, Translator
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.transformer import Transformer
from tests.decoding.builders import random_model, save, sentences, tiny_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path / "model", random_model(4), tiny_tokenizer())


def model_of(translator: Translator) -> Transformer:
    return translator._models[0]


def test_a_narrow_model_stays_exact(directory: Path) -> None:
    translator, tokenizer = load_translator([directory], device="cpu", threads=3)
    assert translator.description == "fp32 (width 32 is too small for int8) on 3 threads of the CPU"
    assert tokenizer.fingerprint == tiny_tokenizer().fingerprint
    assert next(model_of(translator).parameters()).dtype == torch.float32


def test_a_wide_model_is_quantized(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SMALLEST_INT8_WIDTH", 32)
    translator, _ = load_translator([directory], device="cpu", threads=1)
    assert translator.description == "int8 (faster at width 32; --precision fp32 is exact) on 1 thread of the CPU"
    assert isinstance(model_of(translator).output_projection, Int8Linear)
    assert all(translation.text for translation in translator.translate(sentences(5, seed=1)))


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_precision_that_is_asked_for_is_used(directory: Path, name: str, dtype: torch.dtype) -> None:
    translator, _ = load_translator([directory, directory], device="cpu", precision=name, threads=1)  # type: ignore[arg-type]
    assert translator.description == f"{name} on 1 thread of the CPU"
    assert {parameter.dtype for model in translator._models for parameter in model.parameters()} == {dtype}


def test_int8_is_not_for_a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "resolve_device", torch.device)
    with pytest.raises(UsageError, match="precision int8 is for CPUs"):
        load_translator([directory], device="cuda", precision="int8")


def test_slots_are_told_and_only_for_one_model_and_a_beam(directory: Path) -> None:
    translator, _ = load_translator([directory], device="cpu", threads=1, in_slots=True)
    assert translator.description == "fp32 (width 32 is too small for int8) on 1 thread of the CPU, in slots"
    quantized, _ = load_translator([directory], device="cpu", threads=1, precision="int8", in_slots=True)
    assert [line.text != "" for line in quantized.translate(["baki", ""])] == [True, False]
    for paths, search in (([directory] * 2, SearchConfig()), ([directory], SearchConfig(method="sample"))):
        with pytest.raises(UsageError, match="--engine slots is for one model and a beam"):
            load_translator(paths, search=search, device="cpu", in_slots=True)


def test_models_are_loaded_together_only_with_one_tokenizer(tmp_path: Path) -> None:
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer(seed=2)
    first = save(tmp_path / "first", random_model(4), tokenizer)
    second = save(tmp_path / "second", random_model(2, num_layers=1), tokenizer)
    third = save(tmp_path / "third", random_model(3, tokenizer=other), other)
    models, loaded = load_models([first, second])
    assert len(models) == 2
    assert loaded.fingerprint == tokenizer.fingerprint
    with pytest.raises(ArtefactError, match="first and .*third have different tokenizers"):
        load_models([first, second, third])
