"""What a training run must remember to go on as if it had never stopped.

Random numbers are not in here: data order and dropout are functions of the seed and of the position that is.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from mtkit.checkpoint.format import ModelDescription, read_tensors, write_model_files, write_tensors
from mtkit.checkpoint.layout import read_tensor_header
from mtkit.checkpoint.manager import STATE_NAME, Metric, quality
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import read_json, write_json
from mtkit.training.optim import Optimizer, state_shapes

OPTIMIZER_NAME = "optimizer.safetensors"
TRAINED_NAME = "trained.safetensors"
"""The weights that the optimizer updates, where `model.safetensors` holds their moving average."""

FORMAT = 2


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Where a run stands. All counts are over all processes.

    Attributes:
        step: Updates applied.
        epoch: Number of the current epoch, from 0.
        pool: Number of the current pool in the epoch, from 0.
        position: Updates of this pool consumed, applied or skipped.
        micro_per_update: Micro-batches of an update in the pool of the last one; follows from the number of processes that began the pool. None
            before the first.
        pool_digest: Of the pool of the last update (`Pool.digest`), to know it again; None before the first.
        is_packed: Whether the batches of the last update were packed; None before the first.
        num_tgt_tokens: Target tokens consumed, EOS included.
        num_skipped: Updates skipped for a non-finite gradient.
        num_skipped_in_row: Of these, how many came last without one applied.
        elapsed_s: Seconds spent training, over all sessions of the run.
        saving_s: Of these, seconds spent on checkpoints.
        best_value: The best value of the early-stopping metric so far.
        best_loss: The loss of the same validation.
        best_step: Its step.
        num_bad_validations: Validations since then without an improvement.
        scores: Results of the last validation.
        scores_step: Its step.
        last_validation_s: `elapsed_s` of the first update after the last validation, or of the first of all; None where there was none yet.
        is_validation_due: Whether the run was stopped before a validation at this step was done.
        scaler: State of the loss scaling of fp16.
    """

    step: int = 0
    epoch: int = 0
    pool: int = 0
    position: int = 0
    micro_per_update: int | None = None
    pool_digest: str | None = None
    is_packed: bool | None = None
    num_tgt_tokens: int = 0
    num_skipped: int = 0
    num_skipped_in_row: int = 0
    elapsed_s: float = 0.0
    saving_s: float = 0.0
    best_value: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    num_bad_validations: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    scores_step: int | None = None
    last_validation_s: float | None = None
    is_validation_due: bool = False
    scaler: dict[str, float] = field(default_factory=dict)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last update, from 0; `epoch` is already the next one at its end."""
        return max(0, self.epoch - (self.pool == self.position == 0))

    def record_validation(self, scores: dict[str, float], *, metric: Metric) -> bool:
        """Take in the results of a validation at the current step; returns whether it is a new best, see `quality`.

        A result that is not finite is left out, and counts as one without a new best.
        """
        self.scores, self.scores_step = {name: value for name, value in scores.items() if math.isfinite(value)}, self.step
        if metric not in scores:
            return False
        known: dict[str, float | None] = {"loss": self.best_loss, metric: self.best_value}
        best = {name: value for name, value in known.items() if value is not None}
        is_better = metric in self.scores and (metric not in best or quality(self.scores, metric) > quality(best, metric))
        if is_better:
            self.best_value, self.best_loss = self.scores[metric], self.scores.get("loss")
            self.best_step, self.num_bad_validations = self.step, 0
        else:
            self.num_bad_validations += 1
        return is_better

    def to_json(self) -> dict[str, Any]:
        """The state as JSON-ready data."""
        return {
            "format": FORMAT,
            **dataclasses.asdict(self),
            "scores": self.scores if self.scores_step == self.step else {},
            "last_scores": self.scores,
        }

    @classmethod
    def from_json(cls, value: Any, *, path: Path) -> Self:
        """Read what `to_json` gave.

        Raises:
            ArtefactError: It is of another format or incomplete.
        """
        try:
            if value["format"] != FORMAT:
                raise ArtefactError(f"{path}: has format {value['format']!r}, this mtkit reads format {FORMAT}")
            none = dict.fromkeys(("micro_per_update", "pool_digest", "is_packed", "best_loss", "last_validation_s"))
            younger = {**none, "saving_s": 0.0, "is_validation_due": False}  # than the format
            value = {**younger, **value}
            names = [entry.name for entry in dataclasses.fields(cls)]
            return cls(**{**{name: value[name] for name in names}, "scores": value["last_scores"]})
        except (KeyError, TypeError) as error:
            raise ArtefactError(f"{path}: is not the state of a training run: {error!r}") from error


def optimizer_tensors(optimizer: Optimizer, names: dict[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, `KEY/NAME`: for Adam `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; none before the first update."""
    return {f"{key}/{names[parameter]}": value for parameter, entries in optimizer.state.items() for key, value in entries.items()}


def restore_optimizer(optimizer: Optimizer, names: dict[Tensor, str], path: Path) -> None:
    """Put the tensors of a file back into an optimizer.

    Raises:
        ArtefactError: The file is damaged, or belongs to another model or another kind of optimizer.
    """
    if not read_tensor_header(path):  # saved before the first update
        return
    tensors = read_tensors(path, shapes=state_shapes(optimizer, names))
    parameters = {name: parameter for parameter, name in names.items()}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device)


def write_checkpoint_files(
    directory: Path,
    *,
    state: TrainState,
    tensors: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    ema: dict[str, Tensor] | None,
    description: ModelDescription,
    tokenizer: Tokenizer,
) -> None:
    """Write everything that a checkpoint holds into a directory that the caller seals.

    Args:
        directory: Exists and is empty.
        state: Counters and results.
        tensors: The trained weights.
        optimizer: As `optimizer_tensors` gives it.
        ema: Their moving average, or None. It is what was validated, so it is what `model.safetensors` then holds.
        description: Of the model.
        tokenizer: Bundled.
    """
    write_model_files(directory, tensors=tensors if ema is None else ema, description=description, tokenizer=tokenizer)
    write_tensors(directory / OPTIMIZER_NAME, optimizer)
    if ema is not None:
        write_tensors(directory / TRAINED_NAME, tensors)
    write_json(directory / STATE_NAME, state.to_json())


def read_state(directory: Path) -> TrainState:
    """Read the state of a checkpoint directory."""
    return TrainState.from_json(read_json(directory / STATE_NAME), path=directory / STATE_NAME)
