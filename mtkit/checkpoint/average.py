"""The average of several checkpoints of one run: a better model than any of them (Vaswani et al. 2017, section 6.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtkit.artefacts import verify_directory
from mtkit.checkpoint.format import ModelDescription, StoredWeights, read_description, require_fitting_tokenizer, save_model
from mtkit.checkpoint.layout import MODEL_NAME, TOKENIZER_NAME, find_model
from mtkit.checkpoint.manager import StoredCheckpoint, evenly_spaced, quality
from mtkit.config import differences, to_dict
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.config import ONLY_IN_TRAINING


def select_last(checkpoints: Sequence[StoredCheckpoint], count: int, *, every_steps: int | None = None) -> list[StoredCheckpoint]:
    """The `count` checkpoints with the highest step; of a run with `checkpoint.every_steps` those that are `evenly_spaced`, if they suffice.

    Raises:
        UsageError: There are fewer.
    """
    _require(checkpoints, count)
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    spaced = evenly_spaced(ordered, every_steps)
    return (spaced if len(spaced) >= count else ordered)[-count:]


def select_best(checkpoints: Sequence[StoredCheckpoint], count: int, *, metric: str) -> list[StoredCheckpoint]:
    """The `count` checkpoints with the best validation result, see `quality`; of equals the later one.

    Args:
        checkpoints: The candidates; those without this result do not take part.
        count: How many.
        metric: `bleu`, `chrf` (higher is better) or `loss` (lower is better).

    Raises:
        UsageError: There are fewer.
    """
    scored = [checkpoint for checkpoint in checkpoints if metric in checkpoint.scores]
    _require(scored, count, what=f"checkpoints with a validation result for {metric}")
    return sorted(scored, key=lambda checkpoint: (quality(checkpoint.scores, metric), checkpoint.step))[-count:]


def average_tensors(files: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each tensor, summed in fp64 and returned in fp32.

    A tied parameter is one tensor in a file, so it counts once.

    Args:
        files: Mappings with the same names and shapes.
    """
    result = {}
    for name in files[0]:
        total = torch.zeros_like(files[0][name], dtype=torch.float64)
        for tensors in files:
            total += tensors[name]
        result[name] = (total / len(files)).float()
    return result


def average_checkpoints(paths: Sequence[Path], output: Path) -> ModelDescription:
    """Write the average of models or checkpoints as a model directory.

    Args:
        paths: Checkpoint or model directories of the same architecture and tokenizer.
        output: The model directory to make.

    Raises:
        ArtefactError: One is damaged, or they do not fit each other; the message says which and where they differ.
    """
    if not paths:
        raise UsageError("nothing to average: no checkpoint was given")
    descriptions = []
    for path in paths:
        verify_directory(path, level="full")
        find_model(path)  # refuses what is whole but no model
        descriptions.append(read_description(path))
        _require_same(paths[0], descriptions[0], path, descriptions[-1])
    tokenizer = Tokenizer.read_files(paths[-1] / TOKENIZER_NAME)
    require_fitting_tokenizer(tokenizer, descriptions[-1], paths[-1])
    tensors = average_tensors([StoredWeights(path / MODEL_NAME, description) for path, description in zip(paths, descriptions, strict=True)])
    kept = {key: value for key, value in descriptions[-1].provenance.items() if key not in ("scores", "step")}
    steps = [description.provenance.get("step", path.name) for path, description in zip(paths, descriptions, strict=True)]
    description = replace(descriptions[-1], precision="fp32", provenance={**kept, "averaged": steps})
    save_model(output, tensors=tensors, description=description, tokenizer=tokenizer, inputs={"checkpoints": [str(path) for path in paths]})
    return description


def _require(checkpoints: Sequence[StoredCheckpoint], count: int, *, what: str = "checkpoints") -> None:
    if count < 1:
        raise UsageError(f"at least one checkpoint must be averaged, but {count} was asked for")
    if len(checkpoints) < count:
        raise UsageError(
            f"{count} {what} were asked for, but there are {len(checkpoints)}",
            hint="Ask for fewer, or keep more with checkpoint.keep_last and checkpoint.keep_best when training.",
        )


def _require_same(first_path: Path, first: ModelDescription, path: Path, other: ModelDescription) -> None:
    lines = differences(_essentials(first), _essentials(other))
    if lines:
        raise ArtefactError(f"{first_path} and {path} cannot be averaged, they differ in: " + "; ".join(lines))


def _essentials(description: ModelDescription) -> dict[str, Any]:
    sizes = {"src_vocab_size": description.src_vocab_size, "tgt_vocab_size": description.tgt_vocab_size}
    model = {key: value for key, value in to_dict(description.model).items() if key not in ONLY_IN_TRAINING}
    return {**model, **sizes, "tokenizer": description.tokenizer[:16]}
