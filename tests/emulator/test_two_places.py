"""What would fail on a GPU fails where tensors have places; what would not does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .two_places import DEVICE, HOST, TwoPlaces

WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a sum": lambda host, device: host + device,
    "in place": lambda host, device: device.mul_(host),
    "a comparison": torch.equal,
    "a list": lambda host, device: torch.cat([device, host]),
    "numpy": lambda _host, device: device.numpy(),
    "numpy of a view": lambda _host, device: device[1:].numpy(),
    "a parameter": lambda host, device: torch.nn.Parameter(device).detach() * host,
    "assert_close": torch.testing.assert_close,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_gpu_refuses_is_refused(name: str) -> None:
    with TwoPlaces(), pytest.raises((RuntimeError, TypeError, AssertionError)):
        WRONG[name](torch.zeros(3), torch.zeros(3, device=DEVICE))
    WRONG[name](torch.ones(3), torch.ones(3))  # nothing else is wrong with it


def test_places_are_those_of_a_gpu() -> None:
    with TwoPlaces():
        host, device = torch.arange(3.0), torch.zeros(3, device=DEVICE)
        device.copy_(host)
        assert (host.device, device.device) == (HOST, DEVICE)
        assert device.cpu().numpy().tolist() == device.tolist() == [0, 1, 2]
        made = (device + 1, device[1:], torch.zeros_like(device), host.to(DEVICE), host.to(device))
        for t in (*made, *device.split(2)):
            assert t.device == DEVICE
        for t in (device.cpu(), device.to("cpu"), torch.frombuffer(bytearray(4), dtype=torch.uint8)):
            assert t.device == HOST
        p = torch.nn.Parameter(device)
        (p * device).sum().backward()
        assert p.grad is not None
        assert {p.device, p.grad.device, p.detach().device} == {DEVICE}
        assert (device * torch.tensor(2.0)).tolist() == [0, 2, 4]  # the host's numbers go with any
        assert torch.zeros(1, device="meta").device.type == "meta"
