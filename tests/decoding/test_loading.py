"""Which precision and how many threads a model gets, and which models may translate together."""

import copy
from pathlib import Path

import pytest
import torch

from mtkit.checkpoint.format import load_model, save_narrow_model
from mtkit.checkpoint.narrow import StoredPrecision
from mtkit.decoding import loading
from mtkit.decoding.lines import BATCH_TOKENS, SearchConfig
from mtkit.decoding.loading import load_models, load_translator
from mtkit.decoding.quantize import Int8Linear, NativeLinear, RoundedEmbedding, quantize_linear_layers
from mtkit.decoding.steps import inference
from mtkit.decoding.translator import Translator
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.transformer import Transformer
from mtkit.native import kernels, library
from tests.decoding.builders import random_model, save, sentences, tiny_tokenizer
from tests.native.builds import use


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path / "model", random_model(4), tiny_tokenizer())


def model_of(translator: Translator) -> Transformer:
    return translator._models[0]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "reason", lambda: "there is no C compiler")
    monkeypatch.setattr(kernels, "int8_level", lambda: 0)


def kinds(model: Transformer) -> set[type]:
    return {type(module) for module in model.modules()} & {torch.nn.Linear, Int8Linear, NativeLinear}


def test_a_narrow_model_stays_exact(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)
    translator, tokenizer = load_translator([directory], device="cpu", threads=3)
    how = "exact; at width 32 --precision int8 is faster" if kernels.int8_level() else "width 32 is too small for int8"
    assert translator.description == f"fp32 ({how}) on 3 threads of the CPU"
    assert kinds(model_of(translator)) == {torch.nn.Linear}
    assert tokenizer.fingerprint == tiny_tokenizer().fingerprint


def test_a_wide_model_is_quantized(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)
    monkeypatch.setattr(loading, "SMALLEST_INT8_WIDTH", 32)
    if kernels.int8_level() == 0:
        pytest.skip("no products of 8-bit integers here")
    translator, tokenizer = load_translator([directory], device="cpu", threads=1)
    assert translator.description == "int8 (the fastest here; --precision fp32 is exact) on 1 thread of the CPU"
    assert kinds(model_of(translator)) == {NativeLinear}
    assert tokenizer.fingerprint == tiny_tokenizer().fingerprint
    assert all(translation.text for translation in translator.translate(sentences(5, seed=1)))


@pytest.mark.usefixtures("without_kernels")
def test_a_narrow_model_stays_exact_without_them(directory: Path) -> None:
    translator, _ = load_translator([directory], device="cpu", threads=3)
    assert translator.description == (
        "fp32 (width 32 is too small for int8) on 3 threads of the CPU; several times slower than it could be, "
        "since the kernels are not compiled: there is no C compiler"
    )
    assert kinds(model_of(translator)) == {torch.nn.Linear}


@pytest.mark.usefixtures("without_kernels")
def test_a_wide_model_is_quantized_without_them(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SMALLEST_INT8_WIDTH", 32)
    translator, _ = load_translator([directory], device="cpu", threads=1)
    assert translator.description.startswith("int8 (the fastest here; --precision fp32 is exact) on 1 thread of the CPU; several times slower")
    assert kinds(model_of(translator)) == {Int8Linear}
    assert all(translation.text for translation in translator.translate(sentences(5, seed=1)))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("tie", ["none", "three-way"])
def test_a_model_that_is_stored_in_int8_is_quantized_as_one_in_fp32(tie: str, precision: StoredPrecision, tmp_path: Path) -> None:
    original = load_model(save(tmp_path / "model", random_model(4, tie_embeddings=tie), tiny_tokenizer()))
    save_narrow_model(original, tmp_path / "stored", precision=precision)
    translator, _ = load_translator([tmp_path / "stored"], device="cpu", precision="int8", threads=1)
    # AVX2 takes fewer levels than are stored: such weights are rounded twice there.
    is_rounded_twice = precision == "int8" and kernels.int8_level() == 1
    quantized = quantize_linear_layers(copy.deepcopy(load_model(tmp_path / "stored").model if is_rounded_twice else original.model))
    x = torch.randn(3, 32)
    with inference([quantized]):
        expected = quantized.logits(x)
        torch.testing.assert_close(model_of(translator).logits(x), expected, rtol=1e-4, atol=1e-4)
        memory = [model.encode(torch.tensor([[5, 6, 3]]), torch.ones(1, 3, dtype=torch.bool)) for model in (quantized, model_of(translator))]
    torch.testing.assert_close(memory[1], memory[0], rtol=0.1, atol=0.1)  # a tied embedding is stored in 8 bits too


@pytest.mark.parametrize("tie", ["decoder", "three-way"])
def test_an_embedding_that_is_stored_in_8_bits_stays_in_them(tie: str, directory: Path, tmp_path: Path) -> None:
    original = save(tmp_path / "original", random_model(4, tie_embeddings=tie), tiny_tokenizer())
    save_narrow_model(load_model(original), tmp_path / "stored", precision="int8")
    model = model_of(load_translator([tmp_path / "stored"], device="cpu", precision="int8", threads=1)[0])
    embeddings = [model.src_embedding, *([] if model.tgt_embedding is None else [model.tgt_embedding])]
    assert len(embeddings) == (1 if tie == "three-way" else 2)
    for embedding, exact in zip(embeddings, ("src_embedding", "tgt_embedding"), strict=False):
        assert isinstance(embedding, RoundedEmbedding)
        assert embedding.weight_VD.dtype == torch.int8
        weight = load_model(tmp_path / "stored").model.get_parameter(f"{exact}.weight")
        tokens = torch.tensor([[5, 6, 299]])
        torch.testing.assert_close(embedding(tokens), weight[tokens].detach(), rtol=0, atol=0)
    for precision, path in (("fp32", tmp_path / "stored"), ("int8", directory)):
        other = model_of(load_translator([path], device="cpu", precision=precision, threads=1)[0])  # type: ignore[arg-type]
        assert type(other.src_embedding) is torch.nn.Embedding


def test_batches_of_wide_models_are_smaller(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for width in (512, 32):
        monkeypatch.setattr(loading, "SMALLEST_THREADED_WIDTH", width)
        sizes.append(load_translator([directory], device="cpu", threads=1)[0]._batch_tokens)
    assert sizes == [BATCH_TOKENS, loading.WIDE_BATCH_TOKENS]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_precision_that_is_asked_for_is_used(directory: Path, name: str, dtype: torch.dtype) -> None:
    translator, _ = load_translator([directory, directory], device="cpu", precision=name, threads=1)  # type: ignore[arg-type]
    assert translator.description.startswith(f"{name} on 1 thread of the CPU")
    if name == "bf16" and kernels.has_bf16():
        assert kinds(model_of(translator)) == {NativeLinear}
    else:
        assert {parameter.dtype for model in translator._models for parameter in model.parameters()} == {dtype}


def test_int8_is_not_for_a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "resolve_device", torch.device)
    with pytest.raises(UsageError, match="precision int8 is for CPUs"):
        load_translator([directory], device="cuda", precision="int8")


def test_slots_are_told_and_only_for_one_model_and_a_beam(directory: Path) -> None:
    translator, _ = load_translator([directory], device="cpu", precision="fp32", threads=1, in_slots=True)
    assert translator.description == "fp32 on 1 thread of the CPU, in slots; made for GPUs, --engine mtkit is several times faster on a CPU"
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
