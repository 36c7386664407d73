"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019): torch's own function for one step, in its fused form.

`torch.optim.Optimizer` is left out: it imports torch's compiler, which costs every start of a training several seconds and 70 MB, for nothing here.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Adam, or with weight decay AdamW.

    Args:
        parameters: What is trained.
        beta1: Decay of the mean of the gradient.
        beta2: Decay of the mean of its square.
        eps: Added to the root of the mean square.
        weight_decay: Decoupled, per unit of learning rate.
    """

    def __init__(self, parameters: Iterable[Tensor], *, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        """Of each parameter that had a gradient: `step`, the number of steps, fp32, and the means, `exp_avg` and `exp_avg_sq`, in its own format."""
        self._options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}

    @torch.no_grad()
    def step(self, *, lr: float, skip: Tensor | None = None) -> None:
        """Do one step with the gradients that are there.

        Args:
            lr: Learning rate.
            skip: bool, a scalar on the device of the parameters, which is looked at there: true makes the step change nothing.
        """
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        means, squares, steps = ([self.state[parameter][key] for parameter in parameters] for key in ("exp_avg", "exp_avg_sq", "step"))
        adam(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            fused=True,
            found_inf=None if skip is None else skip.float(),
            amsgrad=False,
            maximize=False,
            lr=lr,
            decoupled_weight_decay=bool(self._options["weight_decay"]),
            **self._options,
        )

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """See `zero_gradients`."""
        zero_gradients(self.parameters, set_to_none=set_to_none)


def zero_gradients(parameters: Iterable[Tensor], *, set_to_none: bool) -> None:
    """Drop the gradients, or fill them with zeros where they are."""
    if set_to_none:
        for parameter in parameters:
            parameter.grad = None
    elif gradients := [parameter.grad for parameter in parameters if parameter.grad is not None]:
        torch._foreach_zero_(gradients)
