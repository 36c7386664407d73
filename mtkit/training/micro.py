"""Forward and backward of one micro-batch: eagerly, or, where every batch has the same shape, recorded once as a CUDA graph and then repeated."""

import contextlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtkit.data.loader import Batch, PackedBatch
from mtkit.model.config import ModelConfig
from mtkit.model.device import Precision, can_compile, record_graph
from mtkit.model.layers import Positions
from mtkit.model.transformer import Transformer

MicroStep = Callable[[Batch | PackedBatch, float], tuple[Tensor, Tensor]]
"""(batch, factor) -> loss and negative log-likelihood, as sums; adds the gradient of factor * loss to the parameters' gradients.

The tensors hold until the next call.
"""


def can_pack(config: ModelConfig, device: torch.device, precision: Precision) -> bool:
    """Whether packed batches are faster here: the GPU's kernel for sentences of various lengths takes half precision and drops no weights."""
    return (
        device.type == "cuda"
        and precision.name != "fp32"
        and config.attention_dropout == 0.0
        and config.head_dim % 8 == 0
        and config.head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def compile_layers(model: Transformer) -> None:
    """Let torch compile each layer; layers of one kind share the code. A block of `without_compiled_layers` runs them as they are written."""
    if can_compile():
        for layer in (*model.encoder.layers, *model.decoder.layers):
            layer.compile(dynamic=False)


def without_compiled_layers() -> contextlib.AbstractContextManager[None]:
    """A block for work whose shapes change from call to call, such as validation. Where nothing was compiled, the compiler is not even imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class EagerMicroStep:
    """The plain way.

    Args:
        objective: Loss and negative log-likelihood of a batch.
        precision: Of the matrix products.
        device: Of the model.
    """

    def __init__(self, objective: nn.Module, precision: Precision, device: torch.device) -> None:
        self._objective = objective
        self._precision = precision
        self._device = device

    def __call__(self, batch: Batch | PackedBatch, factor: float) -> tuple[Tensor, Tensor]:
        """See `MicroStep`."""
        moved = batch.to(self._device)
        with self._precision.autocast():
            loss, nll = self._objective(moved)
        (loss * factor).backward()
        return loss.detach(), nll


class GraphedMicroStep:
    """A CUDA graph of the forward and the backward of a packed batch: one launch instead of a thousand.

    The gradients of the parameters become tensors that stay: zero them, but do not drop them.

    Args:
        objective: Loss and negative log-likelihood of a batch.
        precision: Of the matrix products.
        device: A GPU.
    """

    def __init__(self, objective: nn.Module, precision: Precision, device: torch.device) -> None:
        self._objective = objective
        self._precision = precision
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: PackedBatch | None = None
        self._tables: list[Tensor] = []
        self._factor = torch.ones((), device=device)
        self._result: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Batch | PackedBatch, factor: float) -> tuple[Tensor, Tensor]:
        """See `MicroStep`."""
        assert isinstance(batch, PackedBatch)
        if self._graph is None or not self._fits(batch):
            self._record(batch)
        assert self._batch is not None
        assert self._graph is not None
        assert self._result is not None
        for static, tensor in zip(self._batch.tensors(), batch.tensors(), strict=True):
            static.copy_(tensor.pin_memory(), non_blocking=True)
        self._factor.fill_(factor)
        self._graph.replay()
        return self._result

    def _fits(self, batch: PackedBatch) -> bool:
        """Whether the batch has the shape of the recorded ones. A run that goes on with another number of processes first ends the pool in which it
        was, and later pools have micro-batches of another size."""
        return self._batch is not None and [left.shape for left in self._batch.tensors()] == [right.shape for right in batch.tensors()]

    def _record(self, batch: PackedBatch) -> None:
        """Record the step. What is in the gradients is kept, and so is the state of the random number generator."""
        self._graph = self._result = None  # which frees their memory
        self._batch = batch.to(self._device)
        parameters = [parameter for parameter in self._objective.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        kept = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        generator_state = torch.cuda.get_rng_state(self._device)
        self._graph, self._result = record_graph(self._run, self._device)
        # Held, for the recorded step reads them where they were, also when a longer sentence has made the model replace them.
        self._tables = [module.table for module in self._objective.modules() if isinstance(module, Positions)]
        torch.cuda.set_rng_state(generator_state, self._device)
        for parameter, gradient in zip(parameters, kept, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def _run(self) -> tuple[Tensor, Tensor]:
        with self._precision.autocast(cache=False):
            loss, nll = self._objective(self._batch)
        (loss * self._factor).backward()
        return loss.detach(), nll
