import pytest


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(1)
