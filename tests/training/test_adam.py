"""Adam against torch's own optimizer, to the bit."""

import pytest
import torch

from mtkit.training.adam import Adam, zero_gradients

SHAPES = ((3, 4), (5,), (2, 2))


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_it_does_what_torch_does(weight_decay: float) -> None:
    """Learning rates that change, gradients that are missing, and steps that are skipped."""
    ours, theirs = parameters(), parameters()
    optimizer = Adam(ours, beta1=0.8, beta2=0.97, eps=1e-6, weight_decay=weight_decay)
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    reference = kind(theirs, betas=(0.8, 0.97), eps=1e-6, weight_decay=weight_decay, fused=True)
    generator = torch.Generator().manual_seed(2)
    for step, is_skipped in enumerate((False, False, True, False)):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = other.grad = None if index == step == 1 else torch.randn(mine.shape, generator=generator)
        optimizer.step(lr=0.1 / (step + 1), skip=torch.tensor(is_skipped))
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        if not is_skipped:
            reference.step()

        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
            assert list(optimizer.state[mine]) == list(reference.state[other])
            for key, value in reference.state[other].items():
                assert torch.equal(optimizer.state[mine][key], value), key


def test_gradients_are_dropped_or_filled_with_zeros_where_they_are() -> None:
    with_gradient, without, _ = parameters()
    with_gradient.grad = torch.ones(SHAPES[0])
    place = with_gradient.grad.data_ptr()
    zero_gradients([with_gradient, without], set_to_none=False)
    assert with_gradient.grad.data_ptr() == place
    assert not with_gradient.grad.any()
    assert without.grad is None
    zero_gradients([with_gradient, without], set_to_none=True)
    assert with_gradient.grad is None
