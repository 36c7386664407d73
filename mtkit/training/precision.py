"""Loss scaling, which fp16 training needs. The weights are fp32 in any precision; see `mtkit.model.device` for that of the matrix products."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mtkit.errors import DivergedError
from mtkit.model.device import Precision

INITIAL_SCALE = 2.0**16
SMALLEST_SCALE = 2.0**-10
GROWTH_INTERVAL = 2000


class LossScaler:
    """Keeps small fp16 gradients from vanishing: the loss is multiplied by a scale, the gradients divided by it again.

    The scale halves when a gradient overflows and doubles after `GROWTH_INTERVAL` clean updates (Micikevicius et al. 2018, section 3.2). In any other
    precision it is 1 and stays there.

    Args:
        precision: Only `fp16` scales.
    """

    def __init__(self, precision: Precision) -> None:
        self._enabled = precision.needs_loss_scaling
        self.scale = INITIAL_SCALE if self._enabled else 1.0
        self._num_clean = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self._enabled:
            torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def update(self, *, is_finite: bool) -> None:
        """Take note of whether an update had finite gradients.

        Raises:
            DivergedError: The scale fell below `SMALLEST_SCALE`: the overflow is not a matter of scale.
        """
        if not self._enabled:
            return
        if is_finite:
            self._num_clean += 1
            if self._num_clean == GROWTH_INTERVAL:
                self.scale, self._num_clean = self.scale * 2.0, 0
            return
        self.scale, self._num_clean = self.scale / 2.0, 0
        if self.scale < SMALLEST_SCALE:
            raise DivergedError(
                f"the loss scale of fp16 fell to {self.scale}: gradients overflow at any scale",
                hint="Lower optim.lr, lengthen optim.warmup_steps, or train with training.precision = bf16 or fp32.",
            )

    def state(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"scale": self.scale, "num_clean": self._num_clean} if self._enabled else {}

    def restore(self, state: dict[str, float]) -> None:
        """Put back what `state` gave."""
        if self._enabled and state:
            self.scale, self._num_clean = float(state["scale"]), int(state["num_clean"])
