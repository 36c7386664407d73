"""Muon: momentum whose every step is made orthogonal, for the hidden matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

It computes what `torch.optim.Muon` does with `adjust_lr_fn="match_rms_adamw"`, and differs in three things: matrices of one shape are orthogonalized
together, so that a GPU gets a few large products instead of thousands of small ones; stacked projections are orthogonalized one by one; and where
bf16 is slow, as on most CPUs, products are fp32.

Shapes: N matrices, of R rows and C columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mtkit.model.device import resolve_precision

MOMENTUM = 0.95
RMS_OF_ADAM = 0.2
"""Typical root mean square of Adam's step per unit of learning rate (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2)."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon for some matrices, and Adam for all other parameters, in one optimizer.

    A step of a matrix has the size that Adam's would have, so that both go by one learning rate and one weight decay.

    Args:
        num_blocks: The matrices, and of how many equal matrices, one above the other, each is made.
        adam: Optimizes the other parameters; from now on a part of this one.
        weight_decay: Decoupled, per unit of learning rate.
    """

    def __init__(self, num_blocks: Mapping[Tensor, int], adam: torch.optim.Optimizer, *, weight_decay: float) -> None:
        super().__init__(list(num_blocks), {"lr": 0.0, "weight_decay": weight_decay})
        self._num_blocks = dict(num_blocks)
        self._adam = adam
        adam.state = self.state
        self.param_groups.extend(adam.param_groups)

    def owns(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of the matrices."""
        return parameter in self._num_blocks

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do one step with the gradients that are there, or none where `found_inf` says so, as torch's fused optimizers do."""
        assert closure is None, "the loss is computed before"
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self._adam.found_inf = found_inf  # type: ignore[attr-defined]
        self._adam.step()
        matrices = [matrix for matrix in self._num_blocks if matrix.grad is not None]
        if not matrices or (found_inf is not None and found_inf.item()):
            return
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients: list[Any] = [matrix.grad for matrix in matrices]
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1.0 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
        lr, weight_decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        if weight_decay:
            torch._foreach_mul_(matrices, 1.0 - lr * weight_decay)
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
