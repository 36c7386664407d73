"""The optimizer and its learning rate, which is a pure function of the update number."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtkit.errors import ConfigError
from mtkit.training.adam import Adam
from mtkit.training.muon import Muon

Optimizer = Adam | Muon

MAX_R_DROP = 1e6
"""Far above what is of use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Adam as in Vaswani et al. 2017, section 5.3, unless told otherwise."""

    optimizer: Literal["adam", "muon"] = "adam"
    """`muon` takes the matrices of attention and feed-forward layers, with steps of the same size as Adam's, and leaves the rest to Adam."""
    lr: float | None = None
    """The highest learning rate, reached at the end of the warm-up; None = the paper's (d_model * warmup_steps)^-0.5."""
    schedule: Literal["inverse-sqrt", "linear", "cosine", "constant"] = "inverse-sqrt"
    """What follows the warm-up. `linear` and `cosine` end at 0 after training.max_steps."""
    warmup_steps: int = 4000
    """Updates over which the learning rate grows linearly from 0; 0 = none."""
    beta1: float = 0.9
    """Decay of the mean of the gradient."""
    beta2: float = 0.98
    """Decay of the mean of its square."""
    eps: float = 1e-9
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW) per unit of learning rate; 0 = plain Adam."""
    clip_norm: float | None = 1.0
    """Largest Euclidean norm of the gradient; a longer one is scaled down. None = no clipping."""
    label_smoothing: float = 0.1
    """Share of the target distribution that is spread evenly over the vocabulary; 0 to less than 1."""
    r_drop: float = 0.0
    """Weight of the agreement between two passes with different dropout (Liang et al. 2021; 5 there), which double the work of an update and its
    memory; 0 = one pass."""

    def __post_init__(self) -> None:
        if self.lr is not None and self.lr <= 0:
            raise ConfigError(f"lr must be positive, but is {self.lr}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must not be negative, but is {self.warmup_steps}")
        if self.lr is None and self.warmup_steps == 0:
            raise ConfigError("lr is required when warmup_steps is 0")
        for name in ("beta1", "beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and less than 1, but is {getattr(self, name)}")
        if not 0 <= self.r_drop <= MAX_R_DROP:
            raise ConfigError(f"r_drop must be at least 0 and at most {MAX_R_DROP:g}, but is {self.r_drop}")
        if self.eps <= 0:
            raise ConfigError(f"eps must be positive, but is {self.eps}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must not be negative, but is {self.weight_decay}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm must be positive, but is {self.clip_norm}")


def learning_rate(config: OptimConfig, step: int, *, d_model: int, max_steps: int | None) -> float:
    """The learning rate of one update.

    With w = warmup_steps and p the peak: p * step / w up to step w; then for `inverse-sqrt` p * sqrt(w / step) (Vaswani et al. 2017, equation 3, with
    p = (d_model * w)^-0.5), for `linear` and `cosine` p times a factor that falls from 1 at w to 0 at `max_steps`, for `constant` p.

    Args:
        config: The schedule.
        step: Number of the update, from 1.
        d_model: Width of the model, for the paper's peak.
        max_steps: Where `linear` and `cosine` end.
    """
    warmup = config.warmup_steps
    peak = (d_model * warmup) ** -0.5 if config.lr is None else config.lr
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "inverse-sqrt":
        return peak * math.sqrt(max(1, warmup) / step)
    if config.schedule == "constant":
        return peak
    if max_steps is None:
        raise ConfigError(f"optim.schedule = {config.schedule} needs training.max_steps, the update where the learning rate reaches 0")
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return peak * (1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def build_optimizer(parameters: Mapping[Tensor, str], config: OptimConfig) -> Optimizer:
    """The optimizer of a model.

    Args:
        parameters: All that is trained, with the names that a `Transformer` gives them.
        config: Which optimizer.
    """
    num_blocks = {parameter: _num_blocks(parameter, name) for parameter, name in parameters.items()} if config.optimizer == "muon" else {}
    matrices = {parameter: number for parameter, number in num_blocks.items() if number}
    others = [parameter for parameter in parameters if parameter not in matrices]
    adam = Adam(others, beta1=config.beta1, beta2=config.beta2, eps=config.eps, weight_decay=config.weight_decay)
    return Muon(matrices, adam, weight_decay=config.weight_decay) if matrices else adam


def _num_blocks(parameter: Tensor, name: str) -> int:
    """Of how many matrices, one above the other, a hidden matrix is made; 0 for what is no hidden matrix.

    The projections of attention stack Q, K and V, or K and V, each as wide as it is high. The two halves of SwiGLU's first matrix are taken
    as one. Embeddings and the output projection are left to Adam, as the authors of Muon advise.
    """
    if parameter.ndim != 2 or not name.startswith(("encoder.", "decoder.")):
        return 0
    rows, columns = parameter.shape
    return rows // columns if "attention." in name else 1


def optimizer_kind(state: Collection[str]) -> str:
    """What `optim.optimizer` was where a state has these names, `KEY/NAME`."""
    return "muon" if any(name.startswith("momentum_buffer/") for name in state) else "adam"


def state_shapes(optimizer: Optimizer, parameters: Mapping[Tensor, str]) -> dict[str, torch.Size]:
    """The shapes of the optimizer's state after an update, by `KEY/NAME`."""
    shapes = {}
    for parameter, name in parameters.items():
        if isinstance(optimizer, Muon) and optimizer.owns(parameter):
            shapes[f"momentum_buffer/{name}"] = parameter.shape
        else:
            shapes |= {f"exp_avg/{name}": parameter.shape, f"exp_avg_sq/{name}": parameter.shape, f"step/{name}": torch.Size()}
    return shapes
