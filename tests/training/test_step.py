"""Updates. That processes one after the other have the gradient of one is in `test_trainer.py`; here they are real processes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit import config as codec
from mtkit.checkpoint.format import parameters_by_name, read_tensors
from mtkit.data.batching import Budget, PoolPlan, plan_pool, with_packing
from mtkit.data.loader import Batch, PackedBatch
from mtkit.data.shards import ShardSet
from mtkit.distributed import World
from mtkit.model.device import Precision
from mtkit.model.transformer import Transformer
from mtkit.training import step as module
from mtkit.training.config import TrainConfig
from mtkit.training.micro import EagerMicroStep, GraphedMicroStep
from mtkit.training.precision import LossScaler
from mtkit.training.step import UpdateBatch, Updater, halves, update_batches
from tests.helpers import run_on_two_ranks
from tests.training import ranks
from tests.training.toy import TOY


@pytest.fixture(scope="module")
def shards(toy_shards: Path) -> ShardSet:
    return ShardSet.open(toy_shards)


def close(left: dict[str, Tensor], right: dict[str, Tensor], *, relative: float) -> None:
    """Compare by the length of the difference, which rounding in single small numbers does not upset."""
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert float((left[name] - tensor).norm()) <= relative * float(tensor.norm()), name


@dataclasses.dataclass(frozen=True)
class Ranks:
    tensors: list[dict[str, dict[str, Tensor]]]
    facts: list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(toy_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two real processes, connected by gloo, have computed."""
    output = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks("tests.training.ranks", toy_shards, output)
    names = ("first", "last", "weights")
    return Ranks(
        tensors=[{name: read_tensors(output / f"{name}-{rank}.safetensors") for name in names} for rank in range(2)],
        facts=[json.loads((output / f"facts-{rank}.json").read_text()) for rank in range(2)],
    )


@pytest.fixture(scope="module")
def alone(shards: ShardSet) -> Ranks:
    """The same updates on one process, which takes twice as many micro-batches."""
    tensors, facts = ranks.compute(shards, World())
    return Ranks(tensors=[tensors], facts=[facts])


def test_both_processes_have_the_gradient_of_one_with_twice_the_accumulation(two: Ranks, alone: Ranks) -> None:
    for rank in range(2):
        close(two.tensors[rank]["first"], alone.tensors[0]["first"], relative=2e-6)


def test_a_process_without_work_does_not_change_the_gradient(two: Ranks, alone: Ranks, shards: ShardSet) -> None:
    plan = ranks.make_plan(shards, world_size=2)
    assert len(plan.update(plan.num_updates - 1)) % 2 == 1, "else no process is idle"
    idle = next(ranks.batches(shards, World(rank=1, local_rank=1, size=2), position=plan.num_updates - 1))
    assert idle.weights[-1] == 0.0
    for rank in range(2):
        close(two.tensors[rank]["last"], alone.tensors[0]["last"], relative=2e-6)


def test_a_loss_scale_is_gone_before_norm_and_clipping(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """B54."""
    results, gradients = [], []
    for is_scaled in (False, True):
        updater = ranks.make_updater(shards, World(), clip_norm=0.01)
        if is_scaled:
            updater.scaler = LossScaler(Precision(name="fp16", device_type="cuda"))
            assert updater.scaler.scale > 1.0

        def step(*, lr: float, skip: Tensor, updater: Updater = updater) -> None:
            assert not skip
            gradients.append({name: parameter.grad.clone() for parameter, name in updater.parameter_names.items() if parameter.grad is not None})

        monkeypatch.setattr(updater.optimizer, "step", step)
        results.append(updater.run(next(ranks.batches(shards, World(), position=0)), lr=1e-3))
    plain, scaled = results
    assert plain.gradient_norm > 0.01, "else nothing is clipped"
    assert scaled.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-5)
    assert scaled.loss_sum == pytest.approx(plain.loss_sum, rel=1e-6)
    close(gradients[1], gradients[0], relative=1e-5)


def test_gradients_travel_once_per_update(two: Ranks) -> None:
    assert [facts["exchanges"] for facts in two.facts] == [[1, 1, 1]] * 2, "not once per micro-batch"


def test_both_processes_stay_the_same_model(two: Ranks, alone: Ranks) -> None:
    for name, tensor in two.tensors[0]["weights"].items():
        torch.testing.assert_close(two.tensors[1]["weights"][name], tensor, rtol=0, atol=0)
    # As one vector: Adam makes whole steps of the rounding errors that are the gradient of the keys' biases.
    both, one = (
        torch.cat([weights[name].flatten() for name in sorted(weights)]) for weights in (two.tensors[0]["weights"], alone.tensors[0]["weights"])
    )
    assert float((both - one).norm()) < 1e-3 * float(one.norm())


def test_both_processes_report_the_sums_over_both(two: Ranks, alone: Ranks) -> None:
    assert two.facts[0]["results"] == two.facts[1]["results"]
    for both, one in zip(two.facts[0]["results"], alone.facts[0]["results"], strict=True):
        assert both[:3] == pytest.approx(one[:3], rel=1e-5)
        assert (both[3], one[3]) == (True, True)
        assert (both[4], one[4]) == ([2.0, 1.0], [1.0, 0.0])


@pytest.mark.smoke
def test_what_does_not_fit_into_one_process_is_the_same_update_or_error_for_all(two: Ranks) -> None:
    """C3, B55: nobody waits for ever, weights stay equal, nothing half-done is applied, and training can go on."""
    first, second = ({name: tuple(found) for name, found in facts["starved"].items()} for facts in two.facts)
    words = {name: (first[name][0], second[name][0]) for name in first}
    short = ("the memory of another process does not suffice", "the memory does not suffice")
    assert words == {
        "first": ("whole", "whole"),
        "once": ("split", "split"),
        "twice": short,
        "packed": short,
        "try": short,
        "fits": ("tried", "tried"),
        "last": ("whole", "whole"),
    }
    weights = [first[name][1] for name in first]
    assert weights == [second[name][1] for name in second]
    assert len(set(weights)) == 3
    assert weights[1] == weights[2] == weights[3] == weights[4] == weights[5] != weights[6]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_processes_share_an_update_without_overlap(shards: ShardSet, size: int) -> None:
    plan = ranks.make_plan(shards, world_size=size)
    rows = [list(ranks.batches(shards, World(rank=rank, local_rank=rank, size=size), position=0)) for rank in range(size)]
    assert len({len(row) for row in rows}) == 1, "every process takes part in every update"
    total = 0
    for position, shares in enumerate(zip(*rows, strict=True)):
        assert len({len(share.micro_batches) for share in shares}) == 1
        real = [batch for share in shares for batch, weight in zip(share.micro_batches, share.weights, strict=True) if weight]
        num_tokens = sum(batch.num_tgt_tokens for batch in real)
        assert {share.num_tgt_tokens for share in shares} == {num_tokens}
        assert num_tokens == sum(int((shards.tgt_lengths[group] + 1).sum()) for group in plan.update(position))
        seeds = [seed for share in shares for seed in share.seeds]
        assert len(set(seeds)) == len(seeds), "no two micro-batches drop the same units"
        total += num_tokens
    assert total == int((shards.tgt_lengths + 1).sum())


def test_starting_in_the_middle_gives_the_rest(shards: ShardSet) -> None:
    whole = list(ranks.batches(shards, World(), position=0))
    rest = list(ranks.batches(shards, World(), position=3))
    assert len(rest) == len(whole) - 3
    for left, right in zip(whole[3:], rest, strict=True):
        assert left.seeds == right.seeds
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
            assert isinstance(a, Batch)
            assert isinstance(b, Batch)
            assert torch.equal(a.src_BS, b.src_BS)


def test_dropout_depends_on_the_micro_batch_not_on_what_was_drawn_before(shards: ShardSet) -> None:
    updater = ranks.make_updater(shards, World())
    batch = next(ranks.batches(shards, World(), position=0))
    first = ranks.take_gradients(updater, batch)
    torch.rand(100)
    again = ranks.take_gradients(updater, batch)
    other = ranks.take_gradients(updater, dataclasses.replace(batch, seeds=[seed + 1 for seed in batch.seeds]))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_one_update_is_adam_on_the_clipped_gradient(shards: ShardSet) -> None:
    updater = ranks.make_updater(shards, World())
    batch = next(ranks.batches(shards, World(), position=0))
    before = {name: tensor.clone() for name, tensor in parameters_by_name(updater.model).items()}
    gradients = ranks.take_gradients(updater, batch)
    norm = float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    assert norm > 1.0, "else clipping is not tested"
    result = updater.run(batch, lr=1e-2)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    for name, after in parameters_by_name(updater.model).items():
        clipped = gradients[name] / norm
        # Adam's first step: the bias corrections cancel the decays.
        expected = before[name] - 1e-2 * clipped / (clipped.abs() + 1e-9)
        moved = clipped.abs() > 1e-6
        torch.testing.assert_close(after[moved], expected[moved], rtol=1e-4, atol=1e-6)


def test_the_moving_average_is_lent_and_given_back(shards: ShardSet) -> None:
    updater = ranks.make_updater(shards, World())
    updater.ema = {name: torch.full_like(tensor, 0.25) for name, tensor in parameters_by_name(updater.model).items()}
    trained = {name: tensor.clone() for name, tensor in parameters_by_name(updater.model).items()}

    def borrow() -> None:
        with updater.weights_for_use() as model:
            assert not model.training
            assert all(bool((tensor == 0.25).all()) for tensor in parameters_by_name(model).values())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        borrow()
    assert updater.model.training
    assert all(torch.equal(trained[name], tensor) for name, tensor in parameters_by_name(updater.model).items())


def test_the_moving_average_by_hand(shards: ShardSet) -> None:
    updater = ranks.make_updater(shards, World())
    name = "src_embedding.weight"
    updater.ema = {key: tensor.clone() for key, tensor in parameters_by_name(updater.model).items()}
    updater._ema_decay = 0.28
    expected = updater.ema[name].numpy().astype(np.float64)
    for decay, batch in zip((2 / 11, 3 / 12, 0.28), ranks.batches(shards, World(), position=0), strict=False):  # (1 + t) / (10 + t), then that
        updater.run(batch, lr=1e-2)
        expected = decay * expected + (1 - decay) * parameters_by_name(updater.model)[name].numpy()
    np.testing.assert_allclose(updater.ema[name].numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed batches are computed as they would be on a GPU, but not recorded."""
    monkeypatch.setattr(module, "GraphedMicroStep", EagerMicroStep)


def packed_plan(shards: ShardSet) -> PoolPlan:
    """Three micro-batches per update, the last of the pool with fewer."""
    budget = with_packing(Budget(micro_per_update=3, tgt_tokens=40, max_tokens=60), shards.src_lengths, shards.tgt_lengths)
    return plan_pool(shards.src_lengths, shards.tgt_lengths, budget=budget, seed=ranks.SEED, epoch=0, pool=0)


def updates(shards: ShardSet, plan: PoolPlan) -> list[UpdateBatch]:
    return list(update_batches(shards, plan, world=World(), seed=ranks.SEED))


def make_updater(shards: ShardSet, *, is_packed: bool, dropout: float = 0.0, eps: float = 1e-9, **options: Any) -> Updater:
    config = codec.from_dict(TrainConfig, TOY)
    torch.manual_seed(ranks.SEED)
    tokenizer = shards.tokenizer
    model = Transformer(
        dataclasses.replace(config.model, dropout=dropout), src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size
    )
    return Updater(
        model,
        dataclasses.replace(config.optim, eps=eps),
        precision=Precision(name="fp32", device_type="cpu"),
        device=torch.device("cpu"),
        world=World(),
        is_packed=is_packed,
        **options,
    )


def test_packed_updates_equal_padded_ones_of_the_same_sentences(shards: ShardSet, eager: None) -> None:
    plan = packed_plan(shards)
    packed, padded = (make_updater(shards, is_packed=is_packed, eps=1e-3) for is_packed in (True, False))
    before = {name: tensor.clone() for name, tensor in parameters_by_name(packed.model).items()}
    batches = (updates(shards, plan), updates(shards, dataclasses.replace(plan, shape=None)))
    assert all(isinstance(batch, PackedBatch) for batch in batches[0][0].micro_batches)
    assert all(isinstance(batch, Batch) for batch in batches[1][0].micro_batches)
    for left, right in list(zip(*batches, strict=True))[:3]:
        assert len(left.micro_batches) == len(right.micro_batches) == 3
        assert left.num_tgt_tokens == right.num_tgt_tokens
        results = packed.run(left, lr=1e-2), padded.run(right, lr=1e-2)
        for field in ("loss_sum", "nll_sum", "gradient_norm"):
            assert getattr(results[0], field) == pytest.approx(getattr(results[1], field), rel=1e-5)
    weights = parameters_by_name(packed.model)
    close(weights, parameters_by_name(padded.model), relative=1e-5)
    moved = torch.cat([(weights[name] - before[name]).flatten() for name in before]).norm()
    assert moved > 0.01 * torch.cat([tensor.flatten() for tensor in before.values()]).norm(), "else nothing is compared"


def test_packed_updates_keep_the_tensors_of_their_gradients(shards: ShardSet, eager: None) -> None:
    updater = make_updater(shards, is_packed=True)
    first, second, *_ = updates(shards, packed_plan(shards))
    updater.run(first, lr=1e-2)
    kept = {name: parameter.grad for parameter, name in updater.parameter_names.items()}
    for gradient in kept.values():
        assert gradient is not None
        assert (gradient == 0).all(), "an update begins with no gradient"
    # What the second update adds to zeros is its own gradient.
    fresh = make_updater(shards, is_packed=False)
    fresh.model.load_state_dict(updater.model.state_dict())
    expected = ranks.take_gradients(fresh, second)
    updater.accumulate(second)
    for parameter, name in updater.parameter_names.items():
        assert parameter.grad is kept[name], "a recorded step writes where it wrote before"
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


def test_padded_updates_let_go_of_their_gradients(shards: ShardSet) -> None:
    updater = make_updater(shards, is_packed=False)
    updater.run(next(ranks.batches(shards, World(), position=0)), lr=1e-2)
    assert all(parameter.grad is None for parameter in updater.parameter_names)


def test_a_skipped_packed_update_leaves_no_gradient(shards: ShardSet, eager: None) -> None:
    updater = make_updater(shards, is_packed=True)
    first, second, *_ = updates(shards, packed_plan(shards))
    updater.run(first, lr=0.0)
    next(iter(updater.parameter_names)).grad.fill_(torch.inf)  # type: ignore[union-attr]
    assert not updater.run(second, lr=1e-2).is_applied
    assert all(parameter.grad is not None and (parameter.grad == 0).all() for parameter in updater.parameter_names)


def test_only_packed_batches_of_one_process_are_recorded(shards: ShardSet) -> None:
    assert type(make_updater(shards, is_packed=True)._micro_step) is GraphedMicroStep
    assert type(make_updater(shards, is_packed=False)._micro_step) is EagerMicroStep


@pytest.mark.parametrize(("is_packed", "compile_model", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)])
def test_layers_are_compiled_for_packed_batches_on_demand(
    shards: ShardSet, monkeypatch: pytest.MonkeyPatch, is_packed: bool, compile_model: bool, expected: int
) -> None:
    compiled: list[Transformer] = []
    monkeypatch.setattr(module, "compile_layers", compiled.append)
    updater = make_updater(shards, is_packed=is_packed, compile_model=compile_model)
    assert compiled == [updater.model] * expected


def test_packed_and_padded_training_learn_alike(shards: ShardSet, eager: None) -> None:
    budget = Budget(micro_per_update=1, tgt_tokens=240, max_tokens=240)
    num_tokens = int((shards.tgt_lengths + 1).sum())
    curves = []
    for is_packed in (True, False):
        updater = make_updater(shards, is_packed=is_packed, dropout=0.1)
        chosen = with_packing(budget, shards.src_lengths, shards.tgt_lengths) if is_packed else budget
        losses = []
        for epoch in range(32):
            plan = plan_pool(shards.src_lengths, shards.tgt_lengths, budget=chosen, seed=1, epoch=epoch, pool=0)
            losses.append(sum(updater.run(batch, lr=5e-3).nll_sum for batch in updates(shards, plan)) / num_tokens)
        curves.append(np.asarray(losses).reshape(4, 8).mean(axis=1))
    packed, padded = curves
    assert packed[-1] < 0.6 * packed[0], "there is something to learn"
    np.testing.assert_allclose(packed, padded, rtol=0.05)


def test_halves_have_the_gradient_of_the_whole(shards: ShardSet) -> None:
    """C3: without dropout; a row alone is not halved, and packed batches have no halves."""
    updater = ranks.make_updater(shards, World())
    updater.model.eval()
    batch = next(ranks.batches(shards, World(), position=0))
    halved = halves(batch)
    assert halved is not None
    rows = [len(micro_batch.src_BS) for micro_batch in batch.micro_batches if isinstance(micro_batch, Batch)]
    parts = [micro_batch for micro_batch in halved.micro_batches if isinstance(micro_batch, Batch)]
    assert sum(len(part.src_BS) for part in parts) == sum(rows)
    assert max(len(part.src_BS) for part in parts) == max((count + 1) // 2 for count in rows)
    assert sum(part.num_tgt_tokens for part in parts) == batch.num_tgt_tokens
    assert all(bool(part.tgt_mask_BT.any(dim=0).all()) and bool(part.src_mask_BS.any(dim=0).all()) for part in parts), "no column is all padding"
    assert len(set(halved.seeds)) == len(halved.seeds)
    close(ranks.take_gradients(updater, halved), ranks.take_gradients(updater, batch), relative=1e-5)
    single = next(part for part in parts if len(part.src_BS) == 1)
    assert halves(dataclasses.replace(batch, micro_batches=[single], weights=[1.0], seeds=[1])) is None
