"""Muon: momentum whose every step is made orthogonal, for the hidden matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

It computes what `torch.optim.Muon` does with `adjust_lr_fn="match_rms_adamw"`, and differs in three things: matrices of one shape are orthogonalized
together, so that a GPU gets a few large products instead of thousands of small ones; stacked projections of attention are orthogonalized one by one;
and where bf16 is slow, as on most CPUs, products are fp32.

Shapes: N matrices, of R rows and C columns.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from mtkit.model.device import resolve_precision
from mtkit.training.adam import Adam, zero_gradients

MOMENTUM = 0.95
RMS_OF_ADAM = 0.2
"""Typical root mean square of Adam's step per unit of learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2)."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


class Muon:
    """Muon for some matrices, and Adam for all other parameters, in one optimizer.

    A step of a matrix has the size that Adam's would have, so that both go by one learning rate and one weight decay.

    Args:
        num_blocks: The matrices, and of how many equal matrices, one above the other, each is made.
        adam: Optimizes the other parameters; from now on a part of this one.
        weight_decay: Decoupled, per unit of learning rate.
    """

    def __init__(self, num_blocks: Mapping[Tensor, int], adam: Adam, *, weight_decay: float) -> None:
        self.state = adam.state
        """That of Adam, and for each matrix that had a gradient `momentum_buffer`."""
        self._num_blocks = dict(num_blocks)
        self._adam = adam
        self._weight_decay = weight_decay

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [*self._num_blocks, *self._adam.parameters]

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of the matrices."""
        return parameter in self._num_blocks

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """See `zero_gradients`."""
        zero_gradients(self.parameters, set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, *, lr: float, skip: Tensor | None = None) -> None:
        """Do one step with the gradients that are there, or none where `skip` says so, see `Adam.step`."""
        self._adam.step(lr=lr, skip=skip)
        matrices = [matrix for matrix in self._num_blocks if matrix.grad is not None]
        if not matrices or (skip is not None and skip.item()):
            return
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1.0 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
        if self._weight_decay:
            torch._foreach_mul_(matrices, 1.0 - lr * self._weight_decay)
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for matrix, direction in zip(matrices, directions, strict=True):
            rows, columns = matrix.shape
            by_shape[rows // self._num_blocks[matrix], columns].append((matrix, direction))
        dtype = resolve_precision("auto", matrices[0].device).dtype
        for (rows, columns), group in by_shape.items():
            directions_NRC = torch.cat([direction.to(dtype).view(-1, rows, columns) for _, direction in group])
            steps = orthogonalize(directions_NRC).split([self._num_blocks[matrix] for matrix, _ in group])
            size = lr * RMS_OF_ADAM * math.sqrt(max(rows, columns))
            for (matrix, _), step_NRC in zip(group, steps, strict=True):
                matrix.add_(step_NRC.reshape(matrix.shape), alpha=-size)


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Bring all singular values near 1, between about 0.7 and 1.2, and leave the singular vectors: five Newton-Schulz iterations of degree five.

    Args:
        matrices_NRC: In the number format of the products.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if is_tall else matrices_NRC
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
