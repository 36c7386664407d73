import errno
import json
import os
import subprocess
import sys
import typing
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch

from mtkit.artefacts import MANIFEST_NAME, read_manifest, verify_directory
from mtkit.checkpoint.average import average_checkpoints
from mtkit.checkpoint.ctranslate2 import ACTIVATIONS, MAX_POSITIONS, ExportPrecision, export_ctranslate2, import_ctranslate2, pieces_in_order
from mtkit.checkpoint.format import LoadedModel, load_model, parameters_by_name
from mtkit.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from mtkit.decoding.scoring import score_token_pairs
from mtkit.errors import MTKitError, ResourceError
from mtkit.files import read_lines
from mtkit.model.config import Activation, ModelConfig, Norm, TieEmbeddings
from mtkit.model.transformer import VOCAB_MULTIPLE, Transformer
from tests.decoding.builders import save, sentences
from tests.helpers import REPOSITORY

SIZES = {"d_model": 32, "ffn_dim": 48, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 1}


@cache
def tokenizer_of(*, joint: bool) -> Tokenizer:
    """A vocabulary that the matrices pad; the pieces of the two sides differ if there are two."""
    pairs = zip(sentences(300, seed=1), sentences(300, seed=2), strict=True)
    tokenizer = train_tokenizer(pairs, TokenizerConfig(vocab_size=323, joint=joint))
    assert tokenizer.src_vocab_size % VOCAB_MULTIPLE
    return tokenizer


def random_loaded(directory: Path, *, tokenizer: Tokenizer | None = None, **architecture: Any) -> LoadedModel:
    """A model on disk with nothing at its initial value: biases, LayerNorms and the rows that pad a vocabulary are random too."""
    config = ModelConfig(**{**SIZES, **architecture})
    tokenizer = tokenizer or tokenizer_of(joint=config.tie_embeddings == "three-way")
    model = Transformer(config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale, mean = (0.2, 0.0) if parameter.dim() > 1 else (0.5, float("norm.weight" in name))
            parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
    return load_model(save(directory / "model", model, tokenizer))


def log_probs(directory: Path, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[float]:
    """CTranslate2's log-probabilities of pairs."""
    runtime = ctranslate2.Translator(str(directory), compute_type="float32", inter_threads=1, intra_threads=1)
    results = runtime.score_batch(
        [tokenizer.pieces(ids, "src") for ids in sources], [tokenizer.pieces(ids, "tgt") for ids in targets], max_batch_size=32, max_input_length=0
    )
    return [sum(result.log_probs) for result in results]


def assert_same_log_probs(loaded: LoadedModel, exported: Path, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
    ours = [score.log_prob for score in score_token_pairs(loaded.model, sources, targets)]
    assert len({round(value, 3) for value in ours}) > len(ours) // 2
    assert log_probs(exported, loaded.tokenizer, sources, targets) == pytest.approx(ours, abs=1e-4, rel=0)


# --- the same numbers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", typing.get_args(Norm))
@pytest.mark.parametrize("activation", typing.get_args(Activation))
@pytest.mark.parametrize("tying", typing.get_args(TieEmbeddings))
def test_log_probabilities_are_ours_in_every_architecture(norm: Norm, activation: Activation, tying: TieEmbeddings, tmp_path: Path) -> None:
    loaded = random_loaded(tmp_path, norm=norm, activation=activation, tie_embeddings=tying)
    export_ctranslate2(loaded, tmp_path / "exported")
    sources, targets = loaded.tokenizer.encode(sentences(20, seed=3), "src"), loaded.tokenizer.encode(sentences(20, seed=4), "tgt")
    assert_same_log_probs(loaded, tmp_path / "exported", sources, targets)


def multi30k() -> tuple[list[str], list[str]]:
    """200 pairs of its test set of 2016, or made-up ones where it is not there."""
    directory = REPOSITORY.parent / "shared" / "data" / "multi30k"
    if not directory.is_dir():
        return sentences(200, seed=5, max_words=25), sentences(200, seed=6, max_words=25)
    english, german = (read_lines(directory / f"test_2016_flickr.{language}")[:200] for language in ("en", "de"))
    return english, german


def test_log_probabilities_are_ours_on_real_sentences(tmp_path: Path) -> None:
    sources, targets = multi30k()
    tokenizer = train_tokenizer(zip(sources, targets, strict=True), TokenizerConfig(vocab_size=600))
    loaded = random_loaded(tmp_path, tokenizer=tokenizer, d_model=64, num_encoder_layers=3, num_decoder_layers=3)
    export_ctranslate2(loaded, tmp_path / "exported")
    assert_same_log_probs(loaded, tmp_path / "exported", tokenizer.encode(sources, "src"), tokenizer.encode(targets, "tgt"))


def test_log_probabilities_are_ours_up_to_the_last_position(tmp_path: Path) -> None:
    loaded = random_loaded(tmp_path, d_model=8, num_heads=2)
    export_ctranslate2(loaded, tmp_path / "exported")
    row = [5 + 7 * index % 300 for index in range(MAX_POSITIONS - 1)]
    assert_same_log_probs(loaded, tmp_path / "exported", [row, row[:300]], [row[::-1], row[300:]])


def test_an_architecture_option_that_the_export_does_not_know_is_noticed() -> None:
    """Whoever adds an option to the architecture must say here how CTranslate2 expresses it, or refuse it."""
    expressed = {*SIZES, "norm", "activation", "tie_embeddings"}
    of_training = {"dropout", "attention_dropout", "activation_dropout"}
    assert {field.name for field in fields(ModelConfig)} == expressed | of_training
    assert set(ACTIVATIONS) == set(typing.get_args(Activation))


# --- the directory ----------------------------------------------------------------------------------------------------------------------


def test_what_the_directory_holds(tmp_path: Path) -> None:
    loaded = random_loaded(tmp_path, tie_embeddings="none")
    exported = tmp_path / "exported"
    export_ctranslate2(loaded, exported)
    manifest = verify_directory(exported, kind="ctranslate2", level="full")
    assert set(manifest.files) == {
        *("README.md", "config.json", "model.bin", "source_vocabulary.json", "target_vocabulary.json"),
        *("tokenizer/src.model", "tokenizer/tgt.model", "tokenizer/tokenizer.json"),
    }
    assert manifest.inputs == {"model": read_manifest(loaded.path).fingerprint}
    assert manifest.config["tokenizer"] == Tokenizer.read_files(exported / "tokenizer").fingerprint == loaded.tokenizer.fingerprint
    for side, name in (("src", "source"), ("tgt", "target")):
        pieces = json.loads((exported / f"{name}_vocabulary.json").read_bytes())
        assert pieces == pieces_in_order(loaded.tokenizer, typing.cast(Any, side))
        assert len(pieces) == 323
    assert set(json.loads((exported / "config.json").read_bytes()).items()) >= {
        ("unk_token", "<unk>"),
        ("bos_token", "<s>"),
        ("eos_token", "</s>"),
        ("decoder_start_token", "<s>"),
        ("add_source_bos", False),
        ("add_source_eos", True),
    }


def test_tied_matrices_are_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for tying in typing.get_args(TieEmbeddings):
        export_ctranslate2(random_loaded(tmp_path / tying, tie_embeddings=tying), tmp_path / tying / "exported")
        sizes[tying] = (tmp_path / tying / "exported" / "model.bin").stat().st_size
    matrix = 323 * 32 * 4
    assert sizes["none"] - sizes["decoder"] == pytest.approx(matrix, abs=200)
    assert sizes["decoder"] - sizes["three-way"] == pytest.approx(matrix, abs=200)


@pytest.mark.parametrize(("precision", "share", "tolerance"), [("fp16", 0.5, 0.5), ("bf16", 0.5, 4.0), ("int8", 0.3, 4.0)])
def test_a_smaller_precision_is_smaller_and_nearly_the_same(
    precision: ExportPrecision, share: float, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.checkpoint.ctranslate2.MAX_POSITIONS", 64)  # a model this small would be mostly positions
    loaded = random_loaded(tmp_path, d_model=64, ffn_dim=256)
    before = {name: tensor.clone() for name, tensor in parameters_by_name(loaded.model).items()}
    export_ctranslate2(loaded, tmp_path / "fp32")
    export_ctranslate2(loaded, tmp_path / "small", precision=precision)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters_by_name(loaded.model).items())
    size, full_size = ((tmp_path / name / "model.bin").stat().st_size for name in ("small", "fp32"))
    assert size < share * full_size + 5000
    assert read_manifest(tmp_path / "small").config["precision"] == precision
    sources, targets = loaded.tokenizer.encode(sentences(20, seed=3), "src"), loaded.tokenizer.encode(sentences(20, seed=4), "tgt")
    ours = [score.log_prob for score in score_token_pairs(loaded.model, sources, targets)]
    found = log_probs(tmp_path / "small", loaded.tokenizer, sources, targets)
    assert found == pytest.approx(ours, abs=tolerance, rel=0)
    assert found != pytest.approx(ours, abs=1e-4, rel=0)


@pytest.mark.parametrize("tying", ["three-way", "none"])
def test_the_example_in_the_readme_translates(tying: TieEmbeddings, tmp_path: Path) -> None:
    loaded = random_loaded(tmp_path, tie_embeddings=tying)
    export_ctranslate2(loaded, tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    (code,) = (part.split("```")[0] for part in card.split("```python\n")[1:])
    code = code.replace("PATH_OF_THIS_DIRECTORY", str(tmp_path / "exported"))
    code = code.replace("beam_size=4", "beam_size=4, max_decoding_length=9")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().count("\n") == 2


# --- what is refused --------------------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_and_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = random_loaded(tmp_path)
    exported = tmp_path / "exported"
    export_ctranslate2(loaded, exported)
    before = (exported / MANIFEST_NAME).read_bytes()
    with pytest.raises(MTKitError, match="exported: exists already"):
        export_ctranslate2(loaded, exported, precision="int8")
    assert (exported / MANIFEST_NAME).read_bytes() == before

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tokenizer, "write_files", full)
    with pytest.raises(ResourceError, match="other: cannot be written: No space left on device"):
        export_ctranslate2(loaded, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "model"]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = random_loaded(tmp_path)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MTKitError, match="CTranslate2 cannot be used") as raised:
        export_ctranslate2(loaded, tmp_path / "exported")
    assert raised.value.hint == "Install it: pip install 'mtkit[ct2]'"
    assert not (tmp_path / "exported").exists()
    monkeypatch.undo()
    assert import_ctranslate2() is ctranslate2


def test_an_export_is_no_model_and_the_message_says_where_it_goes(tmp_path: Path) -> None:
    export_ctranslate2(random_loaded(tmp_path), tmp_path / "exported")
    with pytest.raises(MTKitError, match="exported: is not a model but of kind ctranslate2") as raised:
        load_model(tmp_path / "exported")
    assert raised.value.hint is not None
    assert "mtkit translate --engine ct2" in raised.value.hint


def test_an_export_is_not_averaged(tmp_path: Path) -> None:
    export_ctranslate2(random_loaded(tmp_path), tmp_path / "exported")
    with pytest.raises(MTKitError, match="exported: is not a model but of kind ctranslate2"):
        average_checkpoints([tmp_path / "exported"], tmp_path / "average")


def test_a_model_whose_name_is_not_utf8_is_exported(tmp_path: Path) -> None:
    loaded = random_loaded(tmp_path)
    moved = loaded.path.rename(tmp_path / os.fsdecode(b"m\xff"))
    export_ctranslate2(replace(loaded, path=moved), tmp_path / "exported")
    assert "m\\udcff" in (tmp_path / "exported" / "README.md").read_text("utf-8")
