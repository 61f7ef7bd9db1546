import pytest
import torch

from tools.bundled_model.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (6, 24), (3, 10, 5)])
def test_the_iteration_makes_all_singular_values_about_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_muon_keeps_the_singular_vectors() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 12)
    u, _, v = torch.linalg.svd(x)
    mapped = u.mT @ orthogonal(x) @ v.mT
    assert torch.allclose(mapped, torch.diag(mapped.diagonal()), atol=1e-4)


def test_matrices_of_a_size_do_not_mix() -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 6) for _ in range(3)]
    gradients = [torch.randn(4, 6) for _ in range(3)]

    def updated(chosen: list[int]) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(start[i].clone()) for i in chosen]
        for weight, i in zip(weights, chosen, strict=True):
            weight.grad = gradients[i]
        Muon(weights, lr=0.1, weight_decay=0.0).step()
        return [weight.detach() for weight in weights]

    together = updated([0, 1, 2])
    for i in range(3):
        assert torch.allclose(together[i], updated([i])[0], atol=1e-6)


def test_muon_finds_the_smallest_value() -> None:
    torch.manual_seed(0)
    target, weight = torch.randn(6, 6), torch.nn.Parameter(torch.zeros(6, 6))
    optimiser = Muon([weight], lr=0.1, weight_decay=0.0)
    for step in range(200):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        optimiser.zero_grad()
        (weight - target).square().sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert (weight - target).abs().max() < 0.1


def test_weights_decay() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.allclose(weight, torch.full((2, 2), 0.95))
