"""The backward of a stage in two halves, as zero-bubble schedules run it."""

import torch
from torch import Tensor, nn

from partbook.dialects.pytorch.backward import backward_of_inputs, backward_of_parameters


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Encoded(nn.Module):
    """A part that meets the path of its input at several nodes, one of which leads to another, and one nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.end = (nn.Linear(4, 4).double() for _ in range(3))
        self.alone = nn.Parameter(torch.rand(4).double())

    def forward(self, x: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        own = self.start(raw).tanh()
        return self.end(own * self.middle(x).tanh()) * own, self.alone * raw


def test_a_backward_in_two_halves_is_the_whole_one() -> None:
    torch.manual_seed(0)
    model, raw, gradient = Encoded(), *(torch.rand(3, 4).double() for _ in range(2))
    x = torch.rand(3, 4, requires_grad=True, dtype=torch.float64)
    torch.autograd.backward(model(x, raw), [gradient, gradient])
    exact, exact_of_x = gradients_of(model), x.grad
    assert exact_of_x is not None
    x.grad = None
    model.zero_grad()
    at_once = {"start.weight", "start.bias", "alone"}
    for again in (False, True):
        found, left = backward_of_inputs(model(x, raw), [gradient, gradient], [x, raw], model.parameters())
        torch.testing.assert_close(found[0], exact_of_x)
        assert found[1] is None
        assert again or gradients_of(model).keys() == at_once
        backward_of_parameters(left)
    torch.testing.assert_close(gradients_of(model), {name: 2 * value for name, value in exact.items()})


def test_a_checkpointed_module_recomputes_once_for_all_of_its_parameters() -> None:
    calls: list[int] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return self.layers(x)

    model, x = Block(), torch.rand(3, 4, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    _, left = backward_of_inputs([output], [torch.ones(3, 4)], [x], model.parameters())
    assert len(left) == 3
    backward_of_parameters(left)
    # forward, and once in each half
    assert len(calls) == 3
