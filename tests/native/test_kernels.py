"""Products, and the rules that hold for all kernels, as they are compiled for this processor and for lesser ones. (What encoder and decoder compute:
tests/decoding/engine/test_rows.py.)"""

import pytest
import torch
from torch import Tensor

from mtkit.native import kernels
from tests.native.builds import BUILDS, use

SHAPES = [(1, 64, 32), (3, 16, 5), (17, 80, 33), (33, 128, 96), (70, 200, 129)]


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def with_int8(build: str) -> int:
    if kernels.int8_level() == 0:
        pytest.skip("no products of 8-bit integers here")
    return kernels.int8_level()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_bf16_needs_matrix_units(build: str) -> None:
    assert not kernels.has_bf16() or build == "this processor"
    assert not kernels.has_bf16() or kernels.int8_level() == 3


def test_the_builds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a processor without AVX2")
    levels = []
    for name in ("AVX2", "SSE"):
        use(name, monkeypatch)
        levels.append(kernels.int8_level())
    assert levels == [1, 0]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.usefixtures("build")
def test_products_in_fp32(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    for given in (bias, None):
        found = kernels.Linear(weight, given, precision="fp32")(x)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_in_int8(rows: int, inputs: int, outputs: int, with_int8: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
    weight, bias = torch.randn(outputs, inputs) * torch.logspace(-1, 1, outputs)[:, None], torch.randn(outputs)
    found = kernels.Linear(weight, None, precision="int8")(x)
    expected = torch.nn.functional.linear(x, weight)
    # Of each row and each output, however small it is beside the others.
    worst = 0.035 if with_int8 == 1 else 0.025
    assert max(relative_error(row, right) for row, right in zip(found, expected, strict=True)) < worst
    torch.testing.assert_close(kernels.Linear(weight, bias, precision="int8")(x), found + bias, rtol=1e-5, atol=1e-4)
    # Exact integers: what the products of the rounded factors give.
    levels = 63 if with_int8 == 1 else 127
    scale_N, scale_R = weight.abs().amax(1) / levels, x.abs().amax(1) / 127
    exact = (x / scale_R[:, None]).round() @ (weight / scale_N[:, None]).round().T * scale_R[:, None] * scale_N
    assert relative_error(found, exact) < 1e-3  # a number half way between two integers may fall on either


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_in_bf16(rows: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)
    if not kernels.has_bf16():
        pytest.skip("no products of bf16 here")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    exact = torch.nn.functional.linear(x.bfloat16().float(), weight.bfloat16().float(), bias)
    torch.testing.assert_close(kernels.Linear(weight, bias, precision="bf16")(x), exact, rtol=1e-4, atol=1e-4)
    x[0, 3] = float("nan")
    assert kernels.Linear(weight, bias, precision="bf16")(x).isnan().any(dim=1).tolist() == [True] + [False] * (rows - 1)


@pytest.mark.usefixtures("with_int8")
def test_a_part_of_a_matrix_is_multiplied_as_it_lies() -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(9, 3 * 32), torch.randn(16, 32)
    for precision in ("fp32", "int8"):
        linear = kernels.Linear(weight, None, precision=precision)
        assert torch.equal(linear(wide[:, 32:64]), linear(wide[:, 32:64].contiguous()))


def test_weights_may_lie_anyhow(build: str) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(80, 64).T, torch.randn(128)[::2], torch.randn(5, 80)
    for precision in ("fp32", "int8") if kernels.int8_level() else ("fp32",):
        expected = kernels.Linear(weight.contiguous(), bias.contiguous(), precision=precision)(x)
        assert torch.equal(kernels.Linear(weight, bias, precision=precision)(x), expected), build


def test_threads_change_nothing(build: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 48), torch.randn(170, 48)
    before = torch.get_num_threads()
    try:
        for precision in ("fp32", "int8") if kernels.int8_level() else ("fp32",):
            linear = kernels.Linear(weight, None, precision=precision)
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(linear(x))
            assert torch.equal(results[0], results[1]), build
            assert torch.equal(results[0], results[2]), build
    finally:
        torch.set_num_threads(before)


def test_a_row_depends_on_itself_alone(build: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 48), torch.randn(50, 48), torch.randn(50)
    x[7] *= 1000.0
    for precision in ("fp32", "int8") if kernels.int8_level() else ("fp32",):
        linear = kernels.Linear(weight, bias, precision=precision)
        together = linear(x)
        for number, row in enumerate(x):
            assert torch.equal(linear(row[None])[0], together[number]), build
        for count in range(1, 18):
            assert torch.equal(linear(x[:count]), together[:count]), (build, count)


@pytest.mark.usefixtures("with_int8")
def test_the_largest_numbers_do_not_overflow() -> None:
    linear = kernels.Linear(torch.ones(4, 2048), None, precision="int8")
    for value in (5.0, -5.0):
        torch.testing.assert_close(linear(torch.full((2, 2048), value)), torch.full((2, 4), 2048 * value), rtol=1e-5, atol=0)
    mixed = torch.ones(4, 2048)
    mixed[:, ::2] = -1.0
    torch.testing.assert_close(kernels.Linear(mixed, None, precision="int8")(mixed[:2]), torch.full((2, 4), 2048.0), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("with_int8")
def test_zeros_give_the_bias() -> None:
    bias = torch.randn(8)
    assert torch.equal(kernels.Linear(torch.randn(8, 16), bias, precision="int8")(torch.zeros(2, 16)), bias.expand(2, 8))
    assert torch.equal(kernels.Linear(torch.zeros(8, 16), bias, precision="int8")(torch.randn(2, 16)), bias.expand(2, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_stays_so(bad: float, build: str) -> None:
    x, weight = torch.randn(3, 32), torch.rand(20, 32) + 0.1
    x[1, 5] = bad
    for precision in ("fp32", "int8") if kernels.int8_level() else ("fp32",):
        found = kernels.Linear(weight, None, precision=precision)(x)
        assert found.isfinite().all(dim=1).tolist() == [True, False, True], build
