"""One update: forward and backward over its micro-batches, one normalization, one clipping, one step of the optimizer.

Nothing else touches gradients. The loss of an update is the sum over its target tokens, over all micro-batches and processes, divided once by their
number; so splitting the same sentences in another way gives the same gradient.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mtkit import faults
from mtkit.data.batching import Lengths, PoolPlan
from mtkit.data.loader import Batch, PackedBatch, Pairs, collate, load_batch, move
from mtkit.distributed import World, all_reduce_sums, all_reduce_tensor
from mtkit.errors import is_out_of_memory
from mtkit.model.device import Precision
from mtkit.model.transformer import Transformer
from mtkit.training.micro import EagerMicroStep, GraphedMicroStep, compile_layers, without_compiled_layers
from mtkit.training.objective import Objective
from mtkit.training.optim import OptimConfig, build_optimizer
from mtkit.training.precision import LossScaler


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBatch:
    """What one process computes for one update.

    Attributes:
        micro_batches: Its micro-batches, all padded or all packed. Where the update has fewer than there are processes, one of them has weight 0:
            a process must take part in the exchange of gradients even when nothing is left for it.
        weights: 1.0 or 0.0 for each micro-batch.
        seeds: Seed of the dropout of each micro-batch: a function of (run seed, epoch, pool, position, micro-batch), not of the process.
        num_tgt_tokens: Target tokens of the whole update, over all processes.
    """

    micro_batches: Sequence[Batch | PackedBatch]
    weights: Sequence[float]
    seeds: Sequence[int]
    num_tgt_tokens: int


class TrainingPairs(Pairs, Protocol):
    """Pairs whose lengths are known. A `Pool` is one."""

    @property
    def src_lengths(self) -> Lengths:
        """Source tokens of each pair, without EOS."""

    @property
    def tgt_lengths(self) -> Lengths:
        """Target tokens of each pair, without EOS."""


def update_batches(pairs: TrainingPairs, plan: PoolPlan, *, world: World, seed: int, position: int = 0) -> Iterator[UpdateBatch]:
    """One process's share of each update of a pool.

    Args:
        pairs: The pool.
        plan: Its batches.
        world: This process among all.
        seed: Of the run.
        position: The update to begin with, from 0.
    """
    while position < plan.num_updates:
        groups = plan.update(position)
        numbers = range(world.rank, -(-len(groups) // world.size) * world.size, world.size)
        yield UpdateBatch(
            micro_batches=[load_batch(pairs, groups[number if number < len(groups) else 0], plan.shape) for number in numbers],
            weights=[float(number < len(groups)) for number in numbers],
            seeds=[_mix(seed, plan.epoch, plan.pool, position, number) for number in numbers],
            num_tgt_tokens=sum(int(pairs.tgt_lengths[group].sum()) + len(group) for group in groups),
        )
        position += 1


def _mix(*numbers: int) -> int:
    """A 63-bit seed from several numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1


def _out_of_memory(is_here: bool) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("the memory does not suffice" if is_here else "the memory of another process does not suffice")


def halves(batch: UpdateBatch) -> UpdateBatch | None:
    """The same sentences in twice as many micro-batches, with other dropout; None where that is not possible."""
    micro_batches: list[Batch | PackedBatch] = []
    weights: list[float] = []
    seeds: list[int] = []
    for micro_batch, weight, seed in zip(batch.micro_batches, batch.weights, batch.seeds, strict=True):
        if isinstance(micro_batch, PackedBatch):  # all have one shape: a smaller one would not be any smaller
            return None
        num_rows = len(micro_batch.src_BS)
        for number, rows in enumerate((slice(0, num_rows // 2), slice(num_rows // 2, num_rows))):
            if rows.start < rows.stop:
                micro_batches.append(_rows(micro_batch, rows))
                weights.append(weight)
                seeds.append(_mix(seed, number))
    if len(micro_batches) == len(batch.micro_batches):
        return None
    return UpdateBatch(micro_batches=micro_batches, weights=weights, seeds=seeds, num_tgt_tokens=batch.num_tgt_tokens)


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some sentences of a batch, without the columns that only the others fill."""
    num_src, num_tgt = (int(mask[rows].sum(dim=1).max()) for mask in (batch.src_mask_BS, batch.tgt_mask_BT))
    src_mask_BS, tgt_mask_BT = batch.src_mask_BS[rows, :num_src], batch.tgt_mask_BT[rows, :num_tgt]
    return Batch(
        src_BS=batch.src_BS[rows, :num_src],
        src_mask_BS=src_mask_BS,
        tgt_in_BT=batch.tgt_in_BT[rows, :num_tgt],
        tgt_out_BT=batch.tgt_out_BT[rows, :num_tgt],
        tgt_mask_BT=tgt_mask_BT,
        num_tgt_tokens=int(tgt_mask_BT.sum()),
        num_src_tokens=int(src_mask_BS.sum()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What an update gave, over all processes.

    Attributes:
        loss_sum: Smoothed loss, summed over target tokens.
        nll_sum: Negative log-likelihood, summed over target tokens.
        gradient_norm: Euclidean norm before clipping; not finite when the update was skipped.
        is_applied: Whether the weights changed.
        is_split: Whether a process made its share in smaller parts than planned, because its memory did not suffice.
        extra_sums: The sums of what each process put in.
    """

    loss_sum: float
    nll_sum: float
    gradient_norm: float
    is_applied: bool
    is_split: bool
    extra_sums: list[float]


class Updater:
    """Owns the weights, the optimizer and the loss scale of a run.

    Args:
        model: On its device, fp32.
        config: Of the optimizer.
        precision: Of the matrix products.
        device: Where the model is.
        world: This process among all.
        ema_decay: Decay per update of the moving average of the weights, or None for none.
        is_packed: Whether all batches are `PackedBatch`es of one shape.
        compile_model: Whether torch may compile the layers for them.
    """

    def __init__(
        self,
        model: Transformer,
        config: OptimConfig,
        *,
        precision: Precision,
        device: torch.device,
        world: World,
        ema_decay: float | None = None,
        is_packed: bool = False,
        compile_model: bool = False,
    ) -> None:
        self.model = model.train()
        self.scaler = LossScaler(precision)
        self.parameter_names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self.optimizer = build_optimizer(self.parameter_names, config)
        self.ema = None if ema_decay is None else {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.num_updates = 0
        self._ema_decay = ema_decay
        self._config = config
        self._precision = precision
        self._device = device
        self._world = world
        self._objective: nn.Module = Objective(model, label_smoothing=config.label_smoothing, r_drop=config.r_drop)
        # Recorded steps read the gradients where they were: these are zeroed then, and not dropped.
        self._keeps_gradients = is_packed and world.size == 1
        if is_packed and compile_model:
            compile_layers(model)
        self._may_have_exchanged = False
        if world.size > 1:
            self._objective = nn.parallel.DistributedDataParallel(
                self._objective, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
            )
            self._objective.register_forward_hook(self._note_exchange)
        self._micro_step = (GraphedMicroStep if self._keeps_gradients else EagerMicroStep)(self._objective, precision, device)

    def run(self, batch: UpdateBatch, *, lr: float, extra: Sequence[float] = ()) -> UpdateResult:
        """Do one update, or skip it when its gradient is not finite.

        Where the memory of a process does not suffice, it tries its share once more in halves; the others wait for it in the exchange of gradients.
        When that fails too, the process exchanges nothing but word of it, and nothing is applied.

        Args:
            batch: This process's share.
            lr: Learning rate.
            extra: Numbers to be summed over all processes on the way, so that they need no exchange of their own.

        Raises:
            RuntimeError: Out of memory, see `errors.is_out_of_memory`; on all processes, unless one runs out in the middle of the exchange.
        """
        sums_here, is_split = self._accumulate_if_it_fits(batch, point="step"), False
        if sums_here is None and (halved := halves(batch)) is not None:
            sums_here, is_split = self._accumulate_if_it_fits(halved, point="step"), True
        is_short = sums_here is None
        if sums_here is None:
            sums_here = self._exchange_nothing()
        loss_sum, nll_sum = sums_here
        gradients = [parameter.grad for parameter in self.parameter_names if parameter.grad is not None]
        self.scaler.unscale(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        more = torch.tensor([is_split, is_short, *extra], dtype=torch.float64)
        sums = torch.cat((torch.stack((loss_sum, nll_sum)).double(), move(more, self._device)))
        all_reduce_tensor(sums, self._world)
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameter_names, self._config.clip_norm, norm)
        # Whether the update counts is decided where the numbers are: a GPU does not wait for us, nor we for it, before all of it is under way.
        is_finite = norm.isfinite() & sums[0].isfinite() & (sums[3] == 0)
        self.optimizer.step(lr=lr, skip=~is_finite)
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        *results, gradient_norm, is_applied = torch.cat((sums, torch.stack((norm.double(), is_finite.double())))).tolist()
        if results[3]:
            raise _out_of_memory(is_short)
        if is_applied:
            self.num_updates += 1
            self._update_ema()
        self.scaler.update(is_finite=bool(is_applied))
        return UpdateResult(
            loss_sum=results[0],
            nll_sum=results[1],
            gradient_norm=gradient_norm,
            is_applied=bool(is_applied),
            is_split=bool(results[2]),
            extra_sums=results[4:],
        )

    def try_out(self, batch: Batch | PackedBatch) -> None:
        """Run a micro-batch forward and backward, to see whether the memory suffices; nothing comes of it.

        Raises:
            RuntimeError: Out of memory, see `errors.is_out_of_memory`; on all processes.
        """
        update = UpdateBatch(micro_batches=[batch], weights=[0.0], seeds=[0], num_tgt_tokens=batch.num_tgt_tokens)
        is_short = self._accumulate_if_it_fits(update, point="try") is None
        if is_short:
            self._exchange_nothing()
        self._start_over()
        if all_reduce_sums([float(is_short)], self._world, self._device)[0]:
            raise _out_of_memory(is_short)

    def _accumulate_if_it_fits(self, batch: UpdateBatch, *, point: str) -> tuple[Tensor, Tensor] | None:
        """`accumulate`, or None where the memory did not suffice; then nothing is left of it."""
        self._may_have_exchanged = False
        try:
            faults.reach(point)
            return self.accumulate(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or self._may_have_exchanged:
                raise
        self._start_over()  # not in the block above, where the error still holds on to what it could not fit
        return None

    def _exchange_nothing(self) -> tuple[Tensor, Tensor]:
        """Take part in the exchange of gradients, for which the other processes wait, with next to no memory."""
        if self._world.size > 1:
            with without_compiled_layers():
                EagerMicroStep(self._objective, self._precision, self._device)(collate([[]], [[]]), 0.0)
        return torch.zeros((), device=self._device), torch.zeros((), device=self._device)

    def _note_exchange(self, objective: nn.Module, _inputs: object, _outputs: object) -> None:
        """After a forward pass: from now on the backward pass may have exchanged a part of the gradients with the other processes."""
        self._may_have_exchanged = bool(objective.require_backward_grad_sync)

    def _start_over(self) -> None:
        """Forget what has been accumulated, and give its memory back."""
        self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def accumulate(self, batch: UpdateBatch) -> tuple[Tensor, Tensor]:
        """Forward and backward of this process's micro-batches; leaves the gradient of the whole update in the parameters.

        Returns:
            This process's loss and negative log-likelihood, as sums.
        """
        loss_sum = torch.zeros((), device=self._device)
        nll_sum = torch.zeros((), device=self._device)
        last = len(batch.micro_batches) - 1
        for index, (micro_batch, weight, seed) in enumerate(zip(batch.micro_batches, batch.weights, batch.seeds, strict=True)):
            torch.manual_seed(seed)
            # Forward and backward of all but the last micro-batch stay local; the last backward exchanges the accumulated gradient.
            is_local = index < last and isinstance(self._objective, nn.parallel.DistributedDataParallel)
            with self._objective.no_sync() if is_local else contextlib.nullcontext():  # type: ignore[operator]
                # Data-parallel training averages over the processes; times their number makes it the sum.
                loss, nll = self._micro_step(micro_batch, weight * self._world.size * self.scaler.scale / batch.num_tgt_tokens)
            loss_sum += loss * weight
            nll_sum += nll * weight
        return loss_sum, nll_sum

    @torch.no_grad()
    def _update_ema(self) -> None:
        """Average in the new weights. The decay grows with the number of updates t, as (1 + t) / (10 + t), up to that of the config, so that the
        weights of the beginning are soon forgotten."""
        if self.ema is not None and self._ema_decay is not None:
            decay = min(self._ema_decay, (1 + self.num_updates) / (10 + self.num_updates))
            torch._foreach_lerp_(list(self.ema.values()), list(self.parameter_names), 1.0 - decay)

    @contextlib.contextmanager
    def weights_for_use(self) -> Iterator[Transformer]:
        """The model in eval mode with the weights that validation and users get: the moving average where there is one. Restored afterwards."""
        trained = None
        if self.ema is not None:
            trained = [parameter.detach().clone() for parameter in self.parameter_names]
            self._assign(self.ema.values())
        self.model.eval()
        try:
            with without_compiled_layers():
                yield self.model
        finally:
            self.model.train()
            if trained is not None:
                self._assign(trained)

    @torch.no_grad()
    def _assign(self, tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(self.parameter_names, tensors, strict=True):
            parameter.copy_(tensor)
