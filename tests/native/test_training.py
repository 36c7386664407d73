"""Operations of training by kernels against the same by torch, forward and backward, as they are compiled for this processor and for lesser ones."""

import pytest
import torch
from torch import Tensor

from mtkit.native import training
from tests.native.builds import BUILDS, use

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(request.param, monkeypatch)
    if not training.available():
        pytest.skip("needs OpenMP")


def assert_near(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    """Up to the rounding of what is stored, beside the largest number."""
    assert found is not None
    assert expected is not None
    difference, expected = (found - expected).detach(), expected.detach()
    assert float(difference.abs().max()) <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "keys", "each"])
@pytest.mark.parametrize(
    ("num_sentences", "num_queries", "num_keys", "num_heads", "channels"),
    [(3, 7, 9, 4, 32), (5, 18, 18, 2, 64), (2, 33, 20, 3, 16), (1, 1, 1, 1, 48)],
)
def test_attention(num_sentences: int, num_queries: int, num_keys: int, num_heads: int, channels: int, mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    d_model = num_heads * channels
    q_rows, k_rows = num_sentences * num_queries, num_sentences * num_keys
    qkv, kv = torch.randn(q_rows + 5, 3 * d_model, dtype=dtype), torch.randn(k_rows + 3, 2 * d_model, dtype=dtype)
    seen = {
        "causal": torch.ones(num_queries, num_keys, dtype=torch.bool).tril(),
        "keys": (torch.arange(num_keys) < torch.randint(1, num_keys + 1, (num_sentences, 1)))[:, None, None, :],
        "each": (torch.rand(num_sentences, 1, num_queries, num_keys) < 0.5) | torch.eye(num_queries, num_keys).bool(),
    }[mask]
    q, k, v = (x.detach().requires_grad_() for x in (qkv[:, :d_model], *kv.chunk(2, dim=1)))  # parts of wider matrices
    assert training.fits_attention(q, k, v, seen, num_heads=num_heads)
    out = training.attend_short(q, k, v, seen, sizes=(num_sentences, num_queries, num_keys), num_heads=num_heads)
    assert out.dtype == dtype
    weight = torch.randn_like(out)
    out.backward(weight)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    by_head = [
        x[: num_sentences * n].view(num_sentences, n, num_heads, channels).transpose(1, 2)
        for x, n in zip(exact, (num_queries, num_keys, num_keys), strict=True)
    ]
    scores = by_head[0] @ by_head[1].transpose(2, 3) / channels**0.5
    weights = scores.masked_fill(~seen, -1e300).softmax(dim=-1)
    expected = (weights @ by_head[2]).transpose(1, 2).reshape(q_rows, d_model)
    expected.backward(weight[:q_rows].double())
    # A query that sees nothing (mask "each", more queries than keys) gets finite numbers, which need not be those of torch.
    sees = seen.expand(num_sentences, 1, num_queries, num_keys).any(dim=3).flatten()
    assert_near(out[:q_rows][sees], expected[sees], dtype)
    assert out.isfinite().all()
    assert not out[q_rows:].any()
    if sees.all():
        for found, right in zip((q, k, v), exact, strict=True):
            assert_near(found.grad, right.grad, dtype)
    assert q.grad is not None
    assert not q.grad[q_rows:].any()


def test_attention_keeps_nan() -> None:
    x = torch.randn(6, 32, requires_grad=True)
    with torch.no_grad():
        x[1, 3] = float("nan")
    out = training.attend_short(x, x, x, torch.ones(3, 3, dtype=torch.bool), sizes=(2, 3, 3), num_heads=2)
    assert out.isnan().any(dim=1).tolist() == [True] * 3 + [False] * 3


def test_what_attention_does_not_take() -> None:
    x, mask = torch.randn(6, 32), torch.ones(3, 3, dtype=torch.bool)
    assert training.fits_attention(x, x, x, mask, num_heads=2)
    assert not training.fits_attention(x, x, x, mask, num_heads=4)  # 8 channels
    assert not training.fits_attention(x.double(), x.double(), x.double(), mask, num_heads=2)
    assert not training.fits_attention(x, x.bfloat16(), x, mask, num_heads=2)
    assert not training.fits_attention(x, x, x, torch.ones(2, 2, 3, 3, dtype=torch.bool), num_heads=2)  # one for each head
    assert not training.fits_attention(x, x.T.contiguous().T, x, mask, num_heads=2)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 4)])
def test_columns_are_split_and_put_together(shape: tuple[int, ...], count: int) -> None:
    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], count * shape[-1], requires_grad=True)
    parts = training.split_columns(wide, count)
    assert all(torch.equal(part, right) for part, right in zip(parts, wide.chunk(count, dim=-1), strict=True))
    together = torch.randn_like(wide)
    (beside,) = torch.autograd.grad(parts, wide, together.chunk(count, dim=-1), retain_graph=True)
    assert torch.equal(beside, together)
    assert beside.data_ptr() == together.data_ptr()
    # In another order, apart, or more than once, they are copied.
    for gradients in (together.chunk(count, dim=-1)[::-1], [torch.randn_like(part) for part in parts]):
        (found,) = torch.autograd.grad(parts, wide, gradients, retain_graph=True)
        assert torch.equal(found, torch.cat(list(gradients), dim=-1))
    (found,) = torch.autograd.grad([parts[0] * 2.0, parts[0]], wide, [together.chunk(count, dim=-1)[0]] * 2)
    assert torch.equal(found, torch.cat([together.chunk(count, dim=-1)[0] * 3.0, torch.zeros_like(wide[..., shape[-1] :])], dim=-1))


def test_gradients_of_parts_of_one_matrix_are_parts_of_one() -> None:
    torch.manual_seed(0)
    seen = torch.ones(4, 4, dtype=torch.bool)
    for widths in ((3,), (1, 2)):  # attention to itself, and to another sequence
        matrices = [torch.randn(8, 32 * width, requires_grad=True) for width in widths]
        q, k, v = (part for matrix, width in zip(matrices, widths, strict=True) for part in matrix.chunk(width, dim=1))
        out = training.attend_short(q, k, v, seen, sizes=(2, 4, 4), num_heads=2)
        q_grad, k_grad, v_grad = torch.autograd.grad(out.sum(), (q, k, v))
        assert v_grad.data_ptr() - k_grad.data_ptr() == 32 * 4
        assert (k_grad.data_ptr() - q_grad.data_ptr() == 32 * 4) == (widths == (3,))
    shared = torch.randn(16, 32, requires_grad=True)  # parts of one, but not of the same rows
    q, k = shared[:4], shared[4:12]
    out = training.attend_short(q, k, k, torch.ones(2, 4, dtype=torch.bool), sizes=(2, 2, 4), num_heads=2)
    assert [grad.shape for grad in torch.autograd.grad(out.sum(), (q, k))] == [(4, 32), (8, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (130, 48), (4, 50, 128)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(shape[-1])
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = (torch.randn(shape) * 3.0 + 1.0).requires_grad_()
    exact_norm, exact_x = torch.nn.LayerNorm(shape[-1]).double(), x.detach().double().requires_grad_()
    exact_norm.load_state_dict(norm.state_dict())
    gradient = torch.randn(shape).to(dtype)
    found = training.layer_norm(x, norm.weight, norm.bias, norm.eps, dtype)
    found.backward(gradient)
    expected = exact_norm(exact_x)
    expected.backward(gradient.double())
    assert found.dtype == dtype
    assert_near(found, expected, dtype)
    for left, right in ((x, exact_x), (norm.weight, exact_norm.weight), (norm.bias, exact_norm.bias)):
        assert_near(left.grad, right.grad, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (70, 128)])
def test_dropout_with_the_sum_that_follows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, change = torch.randn(shape, requires_grad=True), torch.randn(shape, dtype=dtype, requires_grad=True)
    drawn = torch.randint(0, 256, (x.numel(),), dtype=torch.uint8)
    kept = (drawn >= 77).view(shape) * (256.0 / (256.0 - 77))
    gradient = torch.randn(shape)
    found = training.add_dropped(x, change, drawn, 77)
    found.backward(gradient)
    assert_near(found, x + change.float() * kept, torch.float32)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)
    assert_near(change.grad, gradient * kept, dtype)
    assert 0.0 < float((kept == 0).float().mean()) < 0.7


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(200, 64), torch.nn.LayerNorm(64)

    def run() -> list[Tensor]:
        q = x.clone().requires_grad_()
        y = training.layer_norm(q, norm.weight, norm.bias, norm.eps, torch.float32)
        out = training.attend_short(y, y, y, torch.ones(20, 20, dtype=torch.bool).tril(), sizes=(10, 20, 20), num_heads=2)
        dropped = training.add_dropped(x, out, torch.arange(x.numel()).to(torch.uint8), 50)
        (gradient,) = torch.autograd.grad(dropped.square().sum(), q)
        return [dropped.detach(), gradient]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run()
        torch.set_num_threads(threads)
        together = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(left, right) for left, right in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 5, 16, 17, 40, 1003])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_the_softmax_of_the_loss(num_columns: int, epsilon: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_rows = 37
    z_KR, target_K = (torch.randn(num_rows, num_columns) * 6.0).to(dtype), torch.randint(num_columns, (num_rows,))
    if num_columns > 5:
        z_KR[:, -3:] = -torch.inf  # rows that pad the vocabulary
        target_K %= num_columns - 3
        z_KR[7] = -90.0
        z_KR[7, (target_K[7] + 1) % (num_columns - 3)] = 90.0  # the target's probability is 0
        z_KR[8] = -90.0
        z_KR[8, target_K[8]] = 90.0  # it is 1
    exact = z_KR.double()
    log_sum, target_z = exact.logsumexp(dim=1), exact.gather(1, target_K[:, None])[:, 0]
    expected = (exact - log_sum[:, None]).exp()
    expected[torch.arange(num_rows), target_K] = torch.expm1(target_z - log_sum) + epsilon
    assert training.fits_softmax(z_KR)
    lse_K, target_z_K = training.softmax_less_target_(z_KR, target_K, epsilon)
    torch.testing.assert_close(lse_K.double(), log_sum, rtol=1e-6, atol=1e-6)
    assert torch.equal(target_z_K.double(), target_z)
    # Each number for itself: half precision rounds once, and what is subtracted at the target is in fp32.
    relative, absolute = (2**-8, 3e-7) if dtype == torch.bfloat16 else (2e-6, 3e-7)
    torch.testing.assert_close(z_KR.double(), expected, rtol=relative, atol=absolute)
    assert num_columns <= 5 or (z_KR[:, -3:] == 0.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 20, 34])
def test_the_softmax_of_the_loss_keeps_nan(column: int, value: float, dtype: torch.dtype) -> None:
    z_KR = torch.zeros(3, 35, dtype=dtype)
    z_KR[1, column] = value
    lse_K, _ = training.softmax_less_target_(z_KR, torch.tensor([1, 1, 1]), 0.1)
    assert lse_K.isnan().tolist() == [False, True, False]
    assert z_KR.isnan().any(dim=1).tolist() == [False, True, False]
