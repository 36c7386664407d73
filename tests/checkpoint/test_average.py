"""Averages: of tied weights, in high precision, of the right checkpoints, and only of those that fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtkit.checkpoint.average import average_checkpoints, average_tensors, select_best, select_last
from mtkit.checkpoint.format import describe, load_model, parameters_by_name, save_model
from mtkit.checkpoint.manager import StoredCheckpoint
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.transformer import Transformer


def save(directory: Path, model: Transformer, tokenizer: Tokenizer, *, fill: float | None = None, step: int = 1) -> Path:
    tensors = parameters_by_name(model)
    if fill is not None:
        tensors = {name: torch.full_like(tensor, fill) for name, tensor in tensors.items()}
    save_model(directory, tensors=tensors, description=describe(model, tokenizer, provenance={"step": step}), tokenizer=tokenizer)
    return directory


def test_tied_weights_count_once(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    paths = [save(tmp_path / f"m{fill}", model, tokenizer, fill=float(fill), step=fill) for fill in (0, 1)]
    average_checkpoints(paths, tmp_path / "average")
    loaded = load_model(tmp_path / "average")
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in loaded.model.state_dict().values())
    assert loaded.description.provenance["averaged"] == [0, 1]


def test_averaging_one_file_twice_gives_the_file(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    path = save(tmp_path / "m", model, tokenizer)
    average_checkpoints([path, path, path], tmp_path / "average")
    for name, tensor in parameters_by_name(load_model(tmp_path / "average").model).items():
        assert torch.equal(tensor, parameters_by_name(model)[name])


def test_sums_are_exact_where_fp32_would_round() -> None:
    files: list[dict[str, Tensor]] = [{"w": torch.tensor([value])} for value in (1.0, 2.0**-24, 2.0**-24, -1.0)]
    assert average_tensors(files)["w"].item() == 2.0**-25


def test_other_architectures_and_tokenizers_are_refused_by_name(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    first = save(tmp_path / "a", model, tokenizer)
    other_config = replace(model.config, ffn_dim=40)
    other = Transformer(other_config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    second = save(tmp_path / "b", other, tokenizer)
    with pytest.raises(ArtefactError, match="cannot be averaged, they differ in: ffn_dim: 24 -> 40"):
        average_checkpoints([first, second], tmp_path / "average")
    assert not (tmp_path / "average").exists()


def test_a_damaged_input_is_named(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    path = save(tmp_path / "m", model, tokenizer)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(ArtefactError, match=r"m/model\.safetensors: its sha256 differs"):
        average_checkpoints([path], tmp_path / "average")


def stored(step: int, **scores: float) -> StoredCheckpoint:
    return StoredCheckpoint(path=Path(f"step-{step}"), step=step, scores=scores)


CHECKPOINTS = [stored(3, bleu=20.0, loss=2.0), stored(1, bleu=30.0, loss=3.0), stored(2, bleu=30.0, loss=1.0), stored(4)]


@pytest.mark.parametrize(("count", "expected"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4])])
def test_select_last(count: int, expected: list[int]) -> None:
    assert [checkpoint.step for checkpoint in select_last(CHECKPOINTS, count)] == expected


def test_the_last_ones_are_evenly_spaced_if_they_suffice() -> None:
    candidates = [stored(step) for step in (41, 40, 33, 30, 20, 10)]
    for count, expected in ((3, [20, 30, 40]), (4, [10, 20, 30, 40]), (5, [20, 30, 33, 40, 41])):
        assert [checkpoint.step for checkpoint in select_last(candidates, count, every_steps=10)] == expected


@pytest.mark.parametrize(("count", "metric", "expected"), [(1, "bleu", [2]), (2, "bleu", [1, 2]), (1, "loss", [2]), (2, "loss", [3, 2])])
def test_select_best(count: int, metric: str, expected: list[int]) -> None:
    assert [checkpoint.step for checkpoint in select_best(CHECKPOINTS, count, metric=metric)] == expected


def test_of_equals_the_one_with_the_lower_loss_is_taken() -> None:
    candidates = [stored(1, bleu=0.0, loss=4.0), stored(2, bleu=0.0, loss=5.0), stored(3, bleu=0.0, loss=5.0)]
    assert [checkpoint.step for checkpoint in select_best(candidates, 2, metric="bleu")] == [3, 1]


def test_asking_for_more_than_there_are() -> None:
    with pytest.raises(UsageError, match="5 checkpoints were asked for, but there are 4"):
        select_last(CHECKPOINTS, 5)
    with pytest.raises(UsageError, match="4 checkpoints with a validation result for bleu were asked for, but there are 3"):
        select_best(CHECKPOINTS, 4, metric="bleu")
    with pytest.raises(UsageError, match="nothing to average"):
        average_checkpoints([], Path("x"))


def test_models_that_differ_in_dropout_can_be_averaged(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    other = Transformer(replace(model.config, dropout=0.7), src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    paths = [save(tmp_path / "a", model, tokenizer, fill=1.0), save(tmp_path / "b", other, tokenizer, fill=3.0)]
    average_checkpoints(paths, tmp_path / "average")
    assert all(bool((tensor == 2.0).all()) for tensor in load_model(tmp_path / "average").model.state_dict().values())
