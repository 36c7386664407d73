"""One micro-batch: packed or padded, eager, recorded or compiled, the loss and the gradient are the same."""

import dataclasses
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit.data.loader import Batch, PackedBatch, collate, pack
from mtkit.data.packing import PackedShape
from mtkit.model.config import MODEL_PRESETS, ModelConfig
from mtkit.model.device import Precision
from mtkit.model.transformer import Transformer
from mtkit.training.micro import EagerMicroStep, GraphedMicroStep, MicroStep, can_pack, compile_layers, without_compiled_layers
from mtkit.training.objective import Objective

VOCAB = 203
SHAPE = PackedShape(src_tokens=512, tgt_tokens=512, max_sentences=60, max_length=64)
CONFIG = ModelConfig(d_model=64, ffn_dim=96, num_heads=2, num_encoder_layers=2, num_decoder_layers=2, norm="pre", dropout=0.0)

Ids = list[np.ndarray[tuple[int], np.dtype[np.int64]]]


def sentences(count: int, *, seed: int) -> tuple[Ids, Ids]:
    """`count` random pairs of 0 to 17 tokens a side."""
    rng = np.random.default_rng(seed)
    return tuple([rng.integers(4, VOCAB, size=rng.integers(0, 18)) for _ in range(count)] for _ in range(2))  # type: ignore[return-value]


def make_objective(config: ModelConfig = CONFIG, device: str = "cpu") -> Objective:
    torch.manual_seed(3)
    return Objective(Transformer(config, src_vocab_size=VOCAB, tgt_vocab_size=VOCAB).train(), label_smoothing=0.1).to(device)


def gradients(objective: Objective, step: MicroStep, batch: Batch | PackedBatch, *, factor: float = 0.5) -> tuple[float, dict[str, Tensor]]:
    """The loss, and what one call adds to gradients of zero."""
    for parameter in objective.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss, _ = step(batch, factor)
    return float(loss), {name: parameter.grad.clone() for name, parameter in objective.named_parameters() if parameter.grad is not None}


def largest_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """Of all tensors the largest relative distance."""
    return max(float((expected[name].float() - found[name].float()).norm() / (expected[name].float().norm() + 1e-6)) for name in expected)


@pytest.mark.parametrize("count", [40, 3])
def test_packed_equals_padded_in_loss_and_gradient(count: int) -> None:
    objective = make_objective()
    step = EagerMicroStep(objective, Precision(name="fp32", device_type="cpu"), torch.device("cpu"))
    src, tgt = sentences(count, seed=5)
    padded_loss, padded = gradients(objective, step, collate(src, tgt))
    packed_loss, packed = gradients(objective, step, pack(src, tgt, SHAPE))
    assert packed_loss == pytest.approx(padded_loss, rel=1e-6)
    assert largest_difference(padded, packed) < 2e-6


def test_the_factor_scales_the_gradient_and_not_the_loss() -> None:
    objective = make_objective()
    step = EagerMicroStep(objective, Precision(name="fp32", device_type="cpu"), torch.device("cpu"))
    batch = pack(*sentences(10, seed=1), SHAPE)
    loss, once = gradients(objective, step, batch, factor=1.0)
    same_loss, thrice = gradients(objective, step, batch, factor=3.0)
    assert loss == same_loss
    assert largest_difference({name: 3.0 * gradient for name, gradient in once.items()}, thrice) < 1e-5


def test_compiled_layers_are_left_alone_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.training.micro.can_compile", lambda: True)
    calls: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        calls.append("compiled")
        return module.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **_options: setattr(self, "_compiled_call_impl", torch.compile(self._call_impl, backend=backend))
    )
    objective = make_objective()
    compile_layers(objective.model)
    batch = pack(*sentences(5, seed=1), SHAPE)
    with without_compiled_layers(), torch.no_grad():
        plain, _ = objective(batch)
    assert not calls
    with torch.no_grad():
        compiled, _ = objective(batch)
    assert calls
    torch.testing.assert_close(compiled, plain)


def test_a_cpu_or_attention_dropout_or_fp32_takes_padded_batches() -> None:
    assert not can_pack(CONFIG, torch.device("cpu"), Precision(name="bf16", device_type="cpu"))
    assert not can_pack(CONFIG, torch.device("cuda"), Precision(name="fp32", device_type="cuda"))
    assert not can_pack(dataclasses.replace(CONFIG, attention_dropout=0.1), torch.device("cuda"), Precision(name="bf16", device_type="cuda"))


class FakeGraph:
    """Runs what was recorded again, with its results where those of the first time were."""

    def __init__(self, run: Callable[[], tuple[Tensor, Tensor]], result: tuple[Tensor, Tensor]) -> None:
        self._run, self._result = run, result

    def replay(self) -> None:
        for static, value in zip(self._result, self._run(), strict=True):
            static.copy_(value)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Recording, as it is on a GPU, with calls in the place of graphs; gives the list of recordings."""
    recordings: list[torch.device] = []

    def record(run: Callable[[], tuple[Tensor, Tensor]], device: torch.device) -> tuple[FakeGraph, tuple[Tensor, Tensor]]:
        recordings.append(device)
        result = tuple(value.clone() for value in run())
        return FakeGraph(run, result), result  # type: ignore[arg-type, return-value]

    monkeypatch.setattr("mtkit.training.micro.record_graph", record)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda _device: None)
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda _state, _device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return recordings


def test_a_step_is_recorded_anew_for_batches_of_another_shape(recorded: list[torch.device]) -> None:
    """A run that goes on with fewer processes: the pool that it was in has smaller micro-batches than the next one."""
    objective = make_objective()
    device, precision = torch.device("cpu"), Precision(name="fp32", device_type="cpu")
    eager, graphed = EagerMicroStep(objective, precision, device), GraphedMicroStep(objective, precision, device)
    wide = dataclasses.replace(SHAPE, src_tokens=1024, tgt_tokens=768)
    for count, shape in ((40, SHAPE), (3, SHAPE), (60, wide), (25, wide), (10, SHAPE)):
        batch = pack(*sentences(count, seed=count), shape)
        loss, expected = gradients(objective, eager, batch)
        found_loss, found = gradients(objective, graphed, batch)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert largest_difference(expected, found) < 1e-6
    assert len(recorded) == 3


def test_a_recorded_step_keeps_the_positions_that_it_reads(recorded: list[torch.device]) -> None:
    """A longer sentence, in a validation, makes the model compute more positions and drop those that it had."""
    objective = make_objective()
    step = GraphedMicroStep(objective, Precision(name="fp32", device_type="cpu"), torch.device("cpu"))
    step(pack(*sentences(10, seed=1), SHAPE), 1.0)
    assert len(recorded) == 1
    table = weakref.ref(objective.model.positions.table)
    objective.model.positions(5000, like=objective.model.src_weight)
    gc.collect()
    assert table() is not None
    assert objective.model.positions.table is not table()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("name", ["bf16", "fp16"])
    @pytest.mark.parametrize("count", [40, 3])
    @pytest.mark.parametrize("preset", ["tiny", "base"])
    def test_packed_kernels_equal_padded_fp32(self, name: str, count: int, preset: str) -> None:
        objective = make_objective(dataclasses.replace(MODEL_PRESETS[preset], dropout=0.0), "cuda")
        device = torch.device("cuda")
        src, tgt = sentences(count, seed=5)
        fp32_loss, fp32 = gradients(objective, EagerMicroStep(objective, Precision(name="fp32", device_type="cuda"), device), collate(src, tgt))
        precision = Precision(name=name, device_type="cuda")  # type: ignore[arg-type]
        padded_loss, padded = gradients(objective, EagerMicroStep(objective, precision, device), collate(src, tgt))
        packed_loss, packed = gradients(objective, EagerMicroStep(objective, precision, device), pack(src, tgt, SHAPE))
        assert packed_loss == pytest.approx(fp32_loss, rel=2e-3)
        assert padded_loss == pytest.approx(fp32_loss, rel=2e-3)
        # No further from fp32 than the padded batch is, in the same precision.
        assert largest_difference(fp32, packed) < 1.5 * largest_difference(fp32, padded) + 0.01

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_a_recorded_step_equals_an_eager_one(self, is_compiled: bool) -> None:
        device, precision = torch.device("cuda"), Precision(name="bf16", device_type="cuda")
        objective = make_objective(device="cuda")
        eager, graphed = EagerMicroStep(objective, precision, device), GraphedMicroStep(objective, precision, device)
        batches = [pack(*sentences(count, seed=count), SHAPE) for count in (40, 3, 25)]
        expected = [gradients(objective, eager, batch) for batch in batches]
        if is_compiled:
            compile_layers(objective.model)
        for batch, (loss, gradient) in zip(batches, expected, strict=True):
            found_loss, found = gradients(objective, graphed, batch)
            assert found_loss == pytest.approx(loss, rel=2e-3)
            assert largest_difference(gradient, found) < (0.03 if is_compiled else 0.01)

    def test_the_seed_alone_decides_on_dropout(self) -> None:
        device, precision = torch.device("cuda"), Precision(name="bf16", device_type="cuda")
        objective = make_objective(dataclasses.replace(CONFIG, dropout=0.3), "cuda")
        step, batch = GraphedMicroStep(objective, precision, device), pack(*sentences(30, seed=2), SHAPE)
        losses = []
        for seed in (7, 8, 7):
            torch.manual_seed(seed)
            losses.append(gradients(objective, step, batch)[0])
        assert losses[0] == losses[2]
        assert losses[0] != losses[1]

    def test_recording_keeps_gradients_that_are_there(self) -> None:
        device, precision = torch.device("cuda"), Precision(name="bf16", device_type="cuda")
        objective = make_objective(device="cuda")
        batch = pack(*sentences(30, seed=2), SHAPE)
        step = GraphedMicroStep(objective, precision, device)
        step(batch, 1.0)
        once = {name: parameter.grad.clone() for name, parameter in objective.named_parameters() if parameter.grad is not None}
        step(batch, 1.0)
        twice = {name: parameter.grad for name, parameter in objective.named_parameters() if parameter.grad is not None}
        assert largest_difference({name: 2.0 * gradient for name, gradient in once.items()}, twice) < 0.01

    def test_other_shapes_and_longer_positions_between_recorded_steps(self) -> None:
        device, precision = torch.device("cuda"), Precision(name="bf16", device_type="cuda")
        objective = make_objective(device="cuda")
        eager, graphed = EagerMicroStep(objective, precision, device), GraphedMicroStep(objective, precision, device)
        wide = dataclasses.replace(SHAPE, src_tokens=1024, tgt_tokens=768)
        for count, shape in ((40, SHAPE), (60, wide), (25, wide), (10, SHAPE)):
            batch = pack(*sentences(count, seed=count), shape)
            gradients(objective, graphed, batch)
            objective.model.positions(5000 + count, like=objective.model.src_weight)
            torch.cuda.empty_cache()
            _ = [torch.full((2_000_000,), float("nan"), device="cuda") for _ in range(20)]  # into whatever memory is free
            loss, expected = gradients(objective, eager, batch)
            found_loss, found = gradients(objective, graphed, batch)
            assert found_loss == pytest.approx(loss, rel=2e-3)
            assert largest_difference(expected, found) < 0.01

    def test_sentences_that_are_too_long_for_the_own_kernel(self) -> None:
        """They go through torch's attention for sentences of various lengths."""
        device, shape = torch.device("cuda"), dataclasses.replace(SHAPE, max_length=512)
        objective = make_objective(device="cuda")
        src, tgt = sentences(3, seed=5)
        src[1], tgt[1] = (np.random.default_rng(1).integers(4, VOCAB, size=400) for _ in range(2))
        fp32_loss, fp32 = gradients(objective, EagerMicroStep(objective, Precision(name="fp32", device_type="cuda"), device), collate(src, tgt))
        precision = Precision(name="bf16", device_type="cuda")
        packed_loss, packed = gradients(objective, EagerMicroStep(objective, precision, device), pack(src, tgt, shape))
        assert packed_loss == pytest.approx(fp32_loss, rel=2e-3)
        assert largest_difference(fp32, packed) < 0.05
