"""What a run puts on disk and takes up again: its checkpoints, and at its end the model that it hands over."""

from typing import Any

import torch

from mtkit import config as codec
from mtkit import faults
from mtkit.artefacts import read_manifest, verify_directory
from mtkit.checkpoint.format import copy_parameters, describe, parameters_by_name, read_description, read_tensors, save_model
from mtkit.checkpoint.layout import MODEL_NAME
from mtkit.checkpoint.manager import CheckpointManager, StoredCheckpoint
from mtkit.errors import ArtefactError
from mtkit.files import explain_write_errors, make_directory, require_space
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import RunData
from mtkit.training.run import RunDirectory
from mtkit.training.state import OPTIMIZER_NAME, TRAINED_NAME, TrainState, optimizer_tensors, read_state, restore_optimizer, write_checkpoint_files
from mtkit.training.step import Updater


class RunStore:
    """Writes and reads the checkpoints of one run.

    Args:
        config: Of the run.
        data: What it trains on, whose fingerprint every checkpoint carries.
        run: Where its files are.

    Attributes:
        manager: Finds, keeps and removes the checkpoints.
    """

    def __init__(self, config: TrainConfig, *, data: RunData, run: RunDirectory) -> None:
        self.manager = CheckpointManager(run.checkpoints, config=config.checkpoint, metric=config.validation.metric)
        self._config = config
        self._data = data
        self._run = run

    def find(self, *, world_size: int, is_packed: bool) -> tuple[StoredCheckpoint | None, list[str]]:
        """The newest undamaged checkpoint of the run, or None, and warnings.

        Args:
            world_size: Processes with which the run goes on.
            is_packed: Whether its batches are packed from now on.

        Raises:
            ArtefactError: It was trained on other data or with another model, or all are damaged.
        """
        checkpoint, warnings = self.manager.latest()
        warnings = [f"passed over a damaged checkpoint: {line}" for line in warnings]
        if checkpoint is None:
            return None, warnings
        inputs = read_manifest(checkpoint.path, kind="checkpoint").inputs
        if inputs.get("data") != self._data.fingerprint:
            raise ArtefactError(
                f"{checkpoint.path}: was trained on data with the fingerprint {str(inputs.get('data'))[:16]}, "
                f"but the data given now has {self._data.fingerprint[:16]}",
                hint="Give the data that the run was started with, and with --shards the same --dev, or choose another --output for a new run.",
            )
        changes = codec.differences(codec.to_dict(read_description(checkpoint.path).model), codec.to_dict(self._config.model))
        if changes:
            raise ArtefactError(f"{checkpoint.path}: holds another model: " + "; ".join(changes))
        if inputs.get("world_size") != world_size:
            warnings.append(f"the run goes on with {world_size} processes instead of {inputs.get('world_size')}: it is not bit-exact")
        return checkpoint, warnings + _layout_warnings(read_state(checkpoint.path), is_packed=is_packed)

    def restore(self, checkpoint: StoredCheckpoint, updater: Updater) -> TrainState:
        """Put the weights, the optimizer and the loss scale of a checkpoint into an updater; returns the state of the run."""
        path = checkpoint.path
        shapes = {name: tensor.shape for name, tensor in parameters_by_name(updater.model).items()}
        stored = read_tensors(path / MODEL_NAME, shapes=shapes)
        if updater.ema is not None:
            for name, average in updater.ema.items():
                average.copy_(stored[name])
            stored = read_tensors(path / TRAINED_NAME, shapes=shapes)
        copy_parameters(updater.model, stored)
        restore_optimizer(updater.optimizer, updater.parameter_names, path / OPTIMIZER_NAME)
        state = read_state(path)
        updater.scaler.restore(state.scaler)
        updater.num_updates = state.step
        return state

    def save(self, state: TrainState, updater: Updater, *, world_size: int) -> None:
        """Write a checkpoint of the current step; when that fails, those which are there are as they were. Only the main process calls it.

        Raises:
            ResourceError: The disk is full, or would be.
            MTKitError: The place cannot be written.
        """
        state.scaler = updater.scaler.state()
        tensors, optimizer = parameters_by_name(updater.model), optimizer_tensors(updater.optimizer, updater.parameter_names)
        with explain_write_errors(self.manager.directory):
            faults.reach("save")
            make_directory(self.manager.directory)
            require_space(self.manager.directory, sum(tensor.nbytes for part in (tensors, optimizer, updater.ema or {}) for tensor in part.values()))
        inputs = {"data": self._data.fingerprint, "world_size": world_size, "torch": torch.__version__}
        with self.manager.write(state.step, config=codec.to_dict(self._config), inputs=inputs) as directory:
            write_checkpoint_files(
                directory,
                state=state,
                tensors=tensors,
                optimizer=optimizer,
                ema=updater.ema,
                description=describe(updater.model, self._data.tokenizer, provenance=self._provenance(state)),
                tokenizer=self._data.tokenizer,
            )

    def hand_over(self) -> tuple[int, list[str]]:
        """Write the run's model: the best checkpoint by the metric, or the last where none was validated by it. Only the main process calls it.

        Returns:
            Its step, and a line for each damaged one that was passed over.
        """
        best, damage = self._best_undamaged()
        path = best.path
        save_model(
            self._run.model,
            tensors=read_tensors(path / MODEL_NAME),
            description=read_description(path),
            tokenizer=self._data.tokenizer,
            inputs={"checkpoint": read_manifest(path).fingerprint},
            overwrite=True,
        )
        return best.step, damage

    def _best_undamaged(self) -> tuple[StoredCheckpoint, list[str]]:
        """The checkpoint to make the model of, and what is wrong with those that come before it."""
        damage = []
        stored = self.manager.stored()
        ranked = self.manager.ranked(stored)
        for checkpoint in (*ranked, *(checkpoint for checkpoint in reversed(stored) if checkpoint not in ranked)):
            try:
                verify_directory(checkpoint.path, kind="checkpoint", level="full")
            except ArtefactError as error:
                damage.append(error.message)
                continue
            return checkpoint, damage
        raise ArtefactError(f"{self.manager.directory}: holds no undamaged checkpoint to make a model of: " + "; ".join(damage))

    def _provenance(self, state: TrainState) -> dict[str, Any]:
        return {
            "step": state.step,
            "scores": state.scores if state.scores_step == state.step else {},
            "src_lang": self._config.data.src_lang,
            "tgt_lang": self._config.data.tgt_lang,
            "data": self._data.fingerprint,
            "config": codec.to_dict(self._config),
        }


def _layout_warnings(state: TrainState, *, is_packed: bool) -> list[str]:
    """What it means for a run to go on with padded batches after packed ones, or the other way round: each layout deals a pool in its own way."""
    if state.is_packed in (None, is_packed):
        return []
    new, old = ("packed", "padded") if is_packed else ("padded", "packed")
    warning = f"the run goes on with {new} batches instead of {old} ones: it is not bit-exact"
    if state.position:
        warning += ", and the pool of pairs in which it stopped is dealt anew: some of them come twice, others not at all"
    return [warning]
