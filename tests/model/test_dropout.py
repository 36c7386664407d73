"""Dropout: its distribution, its gradient, and that it is a function of the seed."""

import pytest
import torch

from mtkit.model.dropout import add_dropped, dropout
from mtkit.native import training as native


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_share_and_mean(rate: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(1000, 997)
    out = dropout(x, rate, training=True)
    used = round(rate * 256) / 256
    assert abs(used - rate) < 1 / 512
    assert (out == 0).float().mean().item() == pytest.approx(used, abs=0.002)
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - used)])


def test_neighbors_are_independent() -> None:
    torch.manual_seed(2)
    kept = (dropout(torch.ones(80_000), 0.5, training=True) > 0).double().view(-1, 8)
    correlation = torch.corrcoef(kept.T)
    assert (correlation - torch.eye(8)).abs().max().item() < 0.05


def test_every_byte_of_a_draw_is_uniform() -> None:
    # A draw without the sign bit would never drop one element in eight at a small rate, or drop it twice as often.
    torch.manual_seed(3)
    kept = (dropout(torch.ones(800_000), 0.25, training=True) > 0).double().view(-1, 8).mean(0)
    assert kept.tolist() == pytest.approx([0.75] * 8, abs=0.01)


@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 3, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_goes_where_the_value_went(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    out = dropout(x, 0.4, training=True)
    assert out.dtype == dtype
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


def test_a_seed_fixes_it_on_any_number_of_threads() -> None:
    x = torch.randn(200, 501)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        torch.manual_seed(5)
        results.append(dropout(x, 0.3, training=True))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], dropout(x, 0.3, training=True))


def test_off() -> None:
    x = torch.randn(4)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_a_tiny_rate_still_drops_and_a_large_one_still_keeps() -> None:
    torch.manual_seed(6)
    assert (dropout(torch.ones(100_000), 1e-6, training=True) == 0).any()
    assert (dropout(torch.ones(100_000), 0.999, training=True) > 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_with_what_is_dropped_is_the_same_with_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("no kernels here")
    x, change = torch.randn(7, 5, 32), torch.randn(7, 5, 32).to(dtype).requires_grad_()
    results = []
    for with_kernels in (True, False):
        monkeypatch.setattr(native, "available", lambda with_kernels=with_kernels: with_kernels)
        torch.manual_seed(6)
        out = add_dropped(x, change, 0.3, training=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), change)))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=0.02 if dtype == torch.bfloat16 else 1e-6, atol=0.05 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(add_dropped(x, change, 0.3, training=False), x + change)
    assert torch.equal(add_dropped(x, change, 0.0, training=True), x + change)
