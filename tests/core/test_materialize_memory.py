"""What ``materialize`` reads and holds: this rank's slices, and one full parameter at most."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import models
from partbook.core import Mesh, build, create_schedule, materialize, sources
from parts import scheduled_rank


class Recorder:
    """``safe_open`` that counts the elements which are read of each tensor."""

    def __init__(self, monkeypatch):
        self.read = {}
        real = sources.safe_open
        monkeypatch.setattr(sources, "safe_open", lambda *args, **kwargs: self.Handle(real(*args, **kwargs), self.read))

    class Handle:
        def __init__(self, handle, read):
            self.handle, self.read = handle, read

        def __enter__(self):
            return type(self)(self.handle.__enter__(), self.read)

        def __exit__(self, *args):
            return self.handle.__exit__(*args)

        def keys(self):
            return self.handle.keys()

        def get_tensor(self, name):
            tensor = self.handle.get_tensor(name)
            self.read[name] = self.read.get(name, 0) + tensor.numel()
            return tensor

        def get_slice(self, name):
            return Recorder.Slice(self.handle.get_slice(name), name, self.read)

    class Slice:
        def __init__(self, part, name, read):
            self.part, self.name, self.read = part, name, read

        def get_shape(self):
            return self.part.get_shape()

        def __getitem__(self, index):
            tensor = self.part[index]
            self.read[self.name] = self.read.get(self.name, 0) + tensor.numel()
            return tensor


@pytest.mark.parametrize("options", [{}, {"fuse_qkv": True}])
@pytest.mark.parametrize("rank", [0, 3])
def test_no_more_is_read_from_a_folder_than_this_rank_holds(tmp_path, monkeypatch, options, rank):
    models.gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    recorder = Recorder(monkeypatch)
    materialize(scheduled_rank("gpt2", 4, rank, options, meta=True), tmp_path)
    full = {name: parameter.numel() for name, parameter in models.gpt2().named_parameters()}
    split = ("wte.weight", "c_attn.weight", "c_attn.bias", "c_proj.weight", "c_fc.weight", "c_fc.bias")
    expected = {name: size // 4 if name.endswith(split) else size for name, size in full.items()}
    # 99 words in 4 slices of 25, of which the last is one short
    expected["transformer.wte.weight"] = 32 * (25 if rank < 3 else 24)
    assert recorder.read == expected


class LiveBytes(TorchDispatchMode):
    """The peak of the bytes in CPU storages that were made while it is on and are still referred to."""

    def __init__(self):
        super().__init__()
        self.peak, self._known = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if not any(
                    storage.data_ptr() == t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)
                ):
                    self._known[reference.cdata] = (reference, storage.nbytes())
        self._known = {key: value for key, value in self._known.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return out


FULL = 4001 * 32 * 4


def llama_rank(options):
    """Two untied vocabulary matrices of 4001 x 32, beside which everything else is small."""
    config = {"vocab": 4001, "tied": False, "layers": 1, "kv_heads": 8, "num_attention_heads": 8, "head_dim": 4}
    return scheduled_rank("llama", 8, 1, options, meta=True, **config)


def two_in_a_row(_):
    """The first of the two is no longer held when the second is made."""
    make = lambda: nn.Sequential(nn.Embedding(4001, 32), nn.Linear(32, 4001, bias=False))  # noqa: E731
    sch = create_schedule(models.on_meta(make), Mesh(tp=8, rank=1))
    sch["0"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_reduce")
    sch["1"].shard("weight", axis=0, pad=True).sync("fwd_post", "all_gather", axis=-1)
    return build(sch)


def peak_over_part(scheduled, source):
    """Peak bytes of ``materialize`` beyond the rank's own part, in full vocabulary matrices."""
    if source == "state dict":
        source = {name: torch.zeros(shape) for name, shape in scheduled.original.shapes.items()}
    with LiveBytes() as live:
        materialize(scheduled, source)
    part = sum(tensor.numel() * 4 for tensor in [*scheduled.model.parameters(), *scheduled.model.buffers()])
    assert live.peak >= part
    return (live.peak - part) / FULL


@pytest.mark.parametrize("source", [0, "state dict"])
@pytest.mark.parametrize(
    ("make", "options"), [(llama_rank, {}), (llama_rank, {"fuse_qkv": True}), (two_in_a_row, None)]
)
def test_peak_memory_is_this_ranks_part_and_one_full_parameter(make, options, source):
    assert peak_over_part(make(options), source) <= 1


def test_a_source_that_keeps_what_it_made_would_be_seen(monkeypatch):
    """The measurement can fail: with every full tensor kept, the peak is beyond the bound."""
    kept, make = [], sources.FreshSource._make

    def greedy(self, name):
        kept.append(make(self, name))
        return kept[-1]

    monkeypatch.setattr(sources.FreshSource, "_make", greedy)
    assert peak_over_part(llama_rank({}), 0) > 1.5
