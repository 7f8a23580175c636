"""The stand-in for CUDA: nothing before it is asked for, everything as it was afterwards, nothing where CUDA is."""

import subprocess
import sys

import pytest
import torch

from partbook.dialects.megatron import on_cpu
from ranks import on_ranks


@on_ranks(1)
def test_it_is_undone(rank: int) -> None:
    owners = (torch, torch.Tensor, torch.cuda, torch.cuda.random)
    before = [dict(vars(owner)) for owner in owners]
    with on_cpu():
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(2).to("cuda").cuda().pin_memory().device.type == "cpu"
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        # Megatron's streams are the CPU's.
        torch.cuda.manual_seed(3)
        first = torch.rand(2)
        torch.manual_seed(3)
        assert torch.equal(first, torch.rand(2))
        with torch.device("meta"):
            assert torch.empty(2).is_meta
            assert torch.nn.Linear(2, 2).weight.is_meta
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        with pytest.raises(RuntimeError, match="active already"), on_cpu():
            pass
    for owner, names in zip(owners, before, strict=True):
        assert all(vars(owner)[name] is value for name, value in names.items()), owner
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(2, device="cuda")
    with on_cpu():
        pass


@on_ranks(1)
def test_it_refuses_where_there_is_cuda(rank: int) -> None:
    torch.cuda.is_available = lambda: True
    with pytest.raises(RuntimeError, match="CUDA is available"), on_cpu():
        pass


def test_an_import_of_the_dialect_changes_nothing() -> None:
    code = """
import torch
places = [(torch, name) for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand")]
places += [(torch.Tensor, name) for name in ("to", "type", "cuda", "pin_memory", "new_empty", "new_zeros")]
places += [(torch.cuda, name) for name in vars(torch.cuda) if not name.startswith("_")]
before = [getattr(owner, name) for owner, name in places]
import partbook.dialects.megatron
for (owner, name), value in zip(places, before):
    assert getattr(owner, name) == value, name
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
