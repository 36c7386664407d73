"""The training loop: it decides when to update, validate, save and stop; `step.py` decides how an update is made.

A run is a generator of records (see `progress.py`): it writes its files itself, and whoever consumes it shows the records to a person.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mtkit import faults
from mtkit.artefacts import MANIFEST_NAME
from mtkit.checkpoint.manager import StoredCheckpoint
from mtkit.data.batching import Budget
from mtkit.data.loader import Batch, PackedBatch, load_batch
from mtkit.distributed import World, all_reduce_sums
from mtkit.errors import ArtefactError, DataError, DivergedError, MTKitError, ResourceError, StoppedError, is_out_of_memory
from mtkit.files import write_json
from mtkit.model.device import Precision
from mtkit.training.config import TrainConfig, schedule_warning
from mtkit.training.feed import Feed, PlacedBatch, PlannedPool, choose_budget
from mtkit.training.initial import random_model
from mtkit.training.micro import can_pack
from mtkit.training.optim import learning_rate
from mtkit.training.prepare import RunData
from mtkit.training.progress import Meter, MetricsFile, Record, read_metrics
from mtkit.training.run import RunDirectory
from mtkit.training.saving import RunStore
from mtkit.training.signals import StopRequest
from mtkit.training.state import TrainState
from mtkit.training.step import Updater, UpdateResult
from mtkit.training.validate import ValidationFailedError, ValidationStoppedError, validate

MAX_FAILED_SAVES = 3
"""So many saves in a row may fail before the run ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process trains.

    Attributes:
        device: Of the model.
        precision: Of the matrix products.
        world: This process among all.
    """

    device: torch.device
    precision: Precision
    world: World


class Trainer:
    """A training run, new or resumed.

    Args:
        config: Of the run.
        data: What it trains on.
        run: Where its files are.
        place: Where it computes.
        stop: Tells whether a signal asked the run to stop.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        data: RunData,
        run: RunDirectory,
        place: Place,
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.data = data
        self.state = TrainState()
        self.place = place
        self.store = RunStore(config, data=data, run=run)
        faults.reach("init")
        self._is_packed = can_pack(config.model, place.device, place.precision)
        self.updater = Updater(
            random_model(config, data.tokenizer, place.device),
            config.optim,
            precision=place.precision,
            device=place.device,
            world=place.world,
            ema_decay=config.training.ema_decay,
            is_packed=self._is_packed,
            compile_model=config.training.compile_layers,
        )
        self.feed = Feed(data.source, budget=self._budget(place.world.size), seed=config.seed, world=place.world)
        self._run, self._stop, self._clock = run, stop, clock
        self._metrics = MetricsFile(run.metrics if place.world.is_main else None)
        self._meter = Meter()
        self._start_time = self._last_time = clock()
        self._last_save_s: float | None = None  # elapsed seconds at the end of the last save; None = to be taken from the next update
        self._stopping = False
        self._saved_step: int | None = None
        self._num_failed_saves = 0
        self._elapsed_at_start = 0.0

    def _budget(self, num_divisor: int) -> Budget:
        """The size of a micro-batch where their number in an update is to be a multiple of this."""
        return choose_budget(self.data.source, self.config.batch, world_size=num_divisor, is_packed=self._is_packed)

    def largest_batch(self) -> tuple[Batch | PackedBatch, PlannedPool]:
        """The largest micro-batch of the first pool, and the pool."""
        planned = self.feed.plan(0, 0)
        largest = planned.plan.largest(planned.pool.src_lengths, planned.pool.tgt_lengths)
        return load_batch(planned.pool, largest, planned.plan.shape), planned

    def resume(self) -> tuple[StoredCheckpoint | None, list[str]]:
        """Go on from the newest undamaged checkpoint of the run, if there is one.

        Returns:
            The checkpoint, or None for a new run, and warnings.

        Raises:
            ArtefactError: The checkpoint does not fit the data or the model.
        """
        checkpoint, warnings = self.store.find(world_size=self.place.world.size, is_packed=self._is_packed)
        if checkpoint is not None:
            self.state = self.store.restore(checkpoint, self.updater)
            self._saved_step = self.state.step
        return checkpoint, warnings

    # --- the loop -----------------------------------------------------------------------------------------------------------------------

    def train(self) -> Iterator[Record]:
        """Run until a limit, early stopping or a signal; yields the records of `metrics.jsonl` and of the kinds `checkpoint`, `unsaved`, `split`.

        A validation that fails, for whatever reason, is told with its traceback and its result is missing; the run goes on.

        Raises:
            StoppedError: A signal asked for it; the state was saved.
            DivergedError: Too many updates in a row had non-finite gradients.
            ResourceError: An update does not fit into the memory of the device, or the state could not be saved.
        """
        reason = self.finished()
        if reason is not None and self._is_complete():
            yield {"kind": "end", "step": self.state.step, "reason": reason, "resumed": True}
            return
        self._metrics.cut_after(self.state.step, is_validated=self.state.scores_step == self.state.step)
        self._elapsed_at_start = self.state.elapsed_s
        self._last_time = self._start_time = self._clock()
        if reason is None:
            with self._stop.at_once():
                planned = self._plan_first()
            if self.place.world.is_main:
                self._run.save_config(self.config)
            yield self._record({"kind": "start", "step": self.state.step, **self._facts(planned)})
            self._try_largest(planned)
            self._last_time = self._clock()
            if self.state.is_validation_due:
                yield from self._validate()
            with self.feed.prefetch(planned, position=self.state.position) as batches:
                del planned  # a pool is freed when it is used up
                while self.finished() is None and not self._stopping:
                    yield from self._advance(batches)
        yield from self._finish()

    def _plan_first(self) -> PlannedPool:
        """The pool to go on with; it has to be that which the run left, in the same batches, however many processes share them now."""
        state = self.state
        begun_with = state.micro_per_update if state.position > 0 else None
        budget = None if begun_with is None or begun_with == self.feed.budget.micro_per_update else self._budget(begun_with)
        planned = self.feed.plan(state.epoch, state.pool, budget=budget)
        if state.position > 0 and state.pool_digest not in (None, planned.digest):
            raise ArtefactError(
                f"{self._run.path}: stopped in the middle of pool {state.pool} of epoch {state.epoch}, which now holds other pairs",
                hint="Give the same text in the same order that the run was started with, or choose another --output for a new run.",
            )
        return planned

    def finished(self) -> str | None:
        """Which limit the run has reached, or None."""
        limits, state = self.config.training, self.state
        if limits.max_steps is not None and state.step >= limits.max_steps:
            return f"training.max_steps = {limits.max_steps} reached"
        if limits.max_epochs is not None and state.epoch >= limits.max_epochs:
            return f"training.max_epochs = {limits.max_epochs} reached"
        if limits.max_tokens is not None and state.num_tgt_tokens >= limits.max_tokens:
            return f"training.max_tokens = {limits.max_tokens} reached"
        if limits.max_minutes is not None and state.elapsed_s >= limits.max_minutes * 60.0:
            return f"training.max_minutes = {limits.max_minutes:g} reached"
        num_epochs = self.data.source.num_epochs
        if num_epochs is not None and state.epoch >= num_epochs:
            return "the stream ended"
        patience = self.config.validation.patience
        if patience is not None and state.num_bad_validations >= patience:
            return f"no better {self.config.validation.metric} in {patience} validations (best {state.best_value:.4g} at step {state.best_step})"
        return None

    def _is_complete(self) -> bool:
        """Whether the run has done all that comes after its last update, and its model is there; it may have been killed between the two."""
        if self.state.scores_step != self.state.step or not (self._run.metrics.is_file() and (self._run.model / MANIFEST_NAME).is_file()):
            return False
        last = read_metrics(self._run.metrics)[-1:]
        return bool(last) and (last[0]["kind"], last[0]["step"]) == ("end", self.state.step)

    def _advance(self, batches: Iterator[PlacedBatch]) -> Iterator[Record]:
        """One update and what is due after it."""
        asked = self._clock()
        try:
            with self._stop.at_once() if self.place.world.size == 1 else contextlib.nullcontext():  # several stop at the same update, together
                placed = next(batches)
        except StoppedError:
            self._stopping = True
            return
        except DataError as error:  # of a stream, which nobody has read to its end before
            yield from self._log()
            yield from self._save()
            way_on = f"put it right, and begin a new run with its weights, in another --output with --init-from {self._run.path}"
            hint = f"The state at step {self.state.step} is saved. This run cannot go on with other text: {way_on}"
            raise DataError(error.message, hint=hint) from error
        result = self._update(placed, waited=self._clock() - asked)
        if result.is_split:
            yield {"kind": "split", "step": self.state.step, "shapes": placed.tgt_shapes()}
        if self.state.step % self.config.training.log_every_steps == 0 and result.is_applied:
            yield from self._log()
        if self._is_due(self.config.validation.every_steps, self.config.validation.every_minutes, self.state.last_validation_s, result):
            yield from self._log()
            yield from self._validate()
        elif self._is_due(self.config.checkpoint.every_steps, self.config.checkpoint.every_minutes, self._last_save_s, result):
            yield from self._log()
            yield from self._save()

    def _update(self, placed: PlacedBatch, *, waited: float) -> UpdateResult:
        """Do one update and bring the state up to date with it."""
        state = self.state
        lr = learning_rate(self.config.optim, state.step + 1, d_model=self.config.model.d_model, max_steps=self.config.training.max_steps)
        # Signals and clocks differ between processes, and a decision must not: all go by the sum of the signals and by the main process's clock.
        extra = (float(self._stop.requested), float(self._stop.interrupted), self._elapsed() if self.place.world.is_main else 0.0)
        with self._naming_what_does_not_fit(f"update {state.step + 1}"):
            result = self.updater.run(placed.batch, lr=lr, extra=extra)
        requested, interrupted, state.elapsed_s = result.extra_sums
        if requested:
            self._stopping = True
            self._stop.request(interrupted=bool(interrupted))
        state.last_validation_s = state.elapsed_s if state.last_validation_s is None else state.last_validation_s
        self._last_save_s = state.elapsed_s if self._last_save_s is None else self._last_save_s
        state.epoch, state.pool, state.position = placed.following
        state.pool_digest = placed.planned.digest
        state.micro_per_update = placed.planned.plan.micro_per_update
        state.is_packed = placed.planned.plan.shape is not None
        state.num_tgt_tokens += placed.batch.num_tgt_tokens
        now = self._clock()
        if result.is_applied:
            state.step += 1
            state.num_skipped_in_row = 0
            self._meter.add(
                loss_sum=result.loss_sum,
                nll_sum=result.nll_sum,
                num_tokens=placed.batch.num_tgt_tokens,
                gradient_norm=result.gradient_norm,
                seconds=now - self._last_time,
                wait_seconds=waited,
            )
        else:
            self._skip(result, placed)
        self._last_time = now
        return result

    def _try_largest(self, planned: PlannedPool) -> None:
        """Run the largest batch to come, so that a lack of memory shows at once and not after hours. (Packed batches are all of one size.)"""
        if planned.plan.shape is not None:
            return
        largest = planned.plan.largest(planned.pool.src_lengths, planned.pool.tgt_lengths)
        batch = load_batch(planned.pool, largest)
        with self._naming_what_does_not_fit("the largest batch"):
            self.updater.try_out(batch)

    @contextlib.contextmanager
    def _naming_what_does_not_fit(self, what: str) -> Iterator[None]:
        """A block in which a lack of memory becomes an error for users."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"{what} does not fit into the memory of {self.place.device}",
                hint=f"Lower batch.max_tokens, now {self.config.batch.max_tokens}, in a new --output: the same update is then made in more passes. "
                "--dry-run tries the largest batch. The last checkpoint is intact: --init-from with this run goes on from its weights, "
                "and the same command goes on where there is more memory.",
            ) from error

    def _skip(self, result: UpdateResult, placed: PlacedBatch) -> None:
        """Count an update that was not applied; too many in a row end the run."""
        state = self.state
        state.num_skipped += 1
        state.num_skipped_in_row += 1
        if state.num_skipped_in_row < self.config.training.max_skipped_in_row:
            return
        report, pool = self._run.path / "diverged.json", placed.planned.pool
        if self.place.world.is_main:
            place = {"epoch": pool.epoch, "pool": pool.number, "position": placed.position}
            write_json(report, {"step": state.step, **place, "pairs": placed.pair_numbers()})
        raise DivergedError(
            f"{state.num_skipped_in_row} updates in a row had a loss or gradient that is not finite (last after step {state.step}, "
            f"loss {result.loss_sum}, gradient norm {result.gradient_norm})",
            hint=f"{report} names the last batch. Begin anew in another --output with a lower optim.lr, a longer optim.warmup_steps, or "
            "training.precision = fp32; --init-from with a checkpoint from before the loss went up begins with its weights.",
        )

    def _validate(self) -> Iterator[Record]:
        """Validate, take the result into the state, save: in this order, so that a resumed run knows all of it or none.

        A signal stops it: the run ends where it was, and validates anew when it goes on.
        """
        config, state = self.config, self.state
        self._saved_step = None  # a checkpoint of this step without the result, or the word that it is due, would be incomplete
        state.is_validation_due = True
        try:
            with self.updater.weights_for_use() as model:
                scores = validate(
                    model,
                    self.data.tokenizer,
                    self.data.dev,
                    search=config.validation.search if config.validation.translate else None,
                    device=self.place.device,
                    world=self.place.world,
                    max_tokens=config.batch.max_tokens,
                    tgt_lang=config.data.tgt_lang,
                    stop=self._stop,
                )
        except ValidationStoppedError:
            self._stopping = True
            return
        except ValidationFailedError as error:
            yield self._record({"kind": "unvalidated", "step": state.step, "reason": error.reason, "traceback": error.trace})
        else:
            is_best = state.record_validation(scores, metric=config.validation.metric)
            result = {**scores, "is_best": is_best, "elapsed_s": round(self._elapsed(), 1)}
            yield self._record({"kind": "valid", "step": state.step, "epoch": state.last_epoch, **result})
        state.is_validation_due = False
        state.last_validation_s = None
        yield from self._save()
        self._last_time = self._clock()

    def _finish(self) -> Iterator[Record]:
        """Validate and save what is not yet, hand over the model, or raise for a signal."""
        reason = self.finished()
        yield from self._log()
        if reason is not None and self.state.scores_step != self.state.step:
            yield from self._validate()
        yield from self._save(is_last=True)
        if reason is None or self.state.is_validation_due:
            raise StoppedError(
                f"stopped at step {self.state.step}; the state is saved in {self._run.checkpoints}. Run the same command again to go on.",
                interrupted=self._stop.interrupted,
            )
        handed_over, damage = self.store.hand_over() if self.place.world.is_main else (None, [])
        for line in damage:
            yield {"kind": "damaged", "step": self.state.step, "reason": line}
        end = {"reason": reason, "handed_over": handed_over, "elapsed_s": round(self._elapsed(), 1)}
        yield self._record({"kind": "end", "step": self.state.step, **end})

    # --- small parts --------------------------------------------------------------------------------------------------------------------

    def _save(self, *, is_last: bool = False) -> Iterator[Record]:
        """Write a checkpoint of the current step, unless there is one. A failure is told, and raised where it is one too many or the last save.

        All processes hear how it went: none goes on as if it were saved, and none leaves, which would end the others, before it is written.
        """
        self._last_save_s = None
        if self._saved_step == self.state.step:
            return
        begin = self._clock()
        error = self._write_checkpoint() if self.place.world.is_main else None
        self.state.saving_s += self._clock() - begin
        news = (float(error is not None), self.state.elapsed_s if self.place.world.is_main else 0.0)
        has_failed, self.state.elapsed_s = all_reduce_sums(news, self.place.world, self.place.device)
        if has_failed:
            self._num_failed_saves += 1
            if is_last or self._num_failed_saves == MAX_FAILED_SAVES:
                raise ResourceError(
                    f"the state at step {self.state.step} could not be saved"
                    + (f", {self._num_failed_saves} times in a row" if self._num_failed_saves > 1 else "")
                    + f": {error}",
                    hint="The checkpoints that are there are intact. Put it right and run the same command again to go on from the last of them.",
                ) from error
            yield {"kind": "unsaved", "step": self.state.step, "reason": str(error).partition("\n")[0]}
            return
        self._num_failed_saves = 0
        self._saved_step = self.state.step
        yield {"kind": "checkpoint", "step": self.state.step}

    def _write_checkpoint(self) -> Exception | None:
        """What went wrong with it, or None."""
        self.state.elapsed_s = self._elapsed()
        try:
            self._metrics.sync()
            self.store.save(self.state, self.updater, world_size=self.place.world.size)
        except (MTKitError, OSError) as error:
            return error
        return None

    def _elapsed(self) -> float:
        return self._elapsed_at_start + self._clock() - self._start_time

    def _is_due(self, every_steps: int | None, every_minutes: float | None, last_s: float | None, result: UpdateResult) -> bool:
        by_steps = every_steps is not None and result.is_applied and self.state.step % every_steps == 0
        return by_steps or (every_minutes is not None and last_s is not None and self.state.elapsed_s - last_s >= every_minutes * 60.0)

    def _log(self) -> Iterator[Record]:
        if self._meter.is_empty:
            return
        state = self.state
        lr = learning_rate(self.config.optim, state.step, d_model=self.config.model.d_model, max_steps=self.config.training.max_steps)
        values = self._meter.take()
        yield self._record(
            {
                "kind": "train",
                "step": state.step,
                "epoch": state.last_epoch,
                **values,
                "lr": lr,
                "tgt_tokens": state.num_tgt_tokens,
                "skipped": state.num_skipped,
                "elapsed_s": round(self._elapsed(), 1),
                "saving_s": round(state.saving_s, 1),
            }
        )

    def _facts(self, planned: PlannedPool) -> dict[str, Any]:
        """What the run has to do. Padding and correlation are those of the first pool of this session, and the numbers per epoch go by it."""
        updates_per_epoch = self.feed.updates_per_epoch(planned)
        return {
            "device": str(self.place.device),
            "precision": self.place.precision.name,
            "world_size": self.place.world.size,
            "parameters": self.updater.model.num_parameters(),
            "pairs": self.data.source.num_pairs,
            "length_correlation": planned.pool.length_correlation(),
            "pairs_skipped": self.feed.skipped_per_epoch(planned),
            "updates_per_epoch": updates_per_epoch,
            "micro_batches_per_update": self.feed.budget.micro_per_update,
            "padding_share": planned.plan.padding_share,
            "warning": schedule_warning(self.config, updates_per_epoch=updates_per_epoch, padding_share=planned.plan.padding_share),
        }

    def _record(self, record: Record) -> Record:
        self._metrics.append(record)
        return record
