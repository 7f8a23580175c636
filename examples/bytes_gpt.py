"""A small byte-level GPT-2 and its training data: the sources of the Python standard library on this machine."""

import sysconfig
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

NUM_TOKENS = 257  # the 256 bytes and one mark
FILE_MARK = 256  # stands before each file
WINDOW = 128  # tokens per sample
CORPUS_BYTES = 4_000_000
HELD_OUT_WINDOWS = 32
WARM_UP_STEPS = 20


def build_model(seed: int) -> GPT2LMHeadModel:
    """A GPT-2 of 4.8 M parameters, the same for the same seed.

    Dropout is off, so that two trainings can be compared step by step.
    """
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=NUM_TOKENS,
        n_positions=WINDOW,
        n_embd=256,
        n_layer=6,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=FILE_MARK,
        eos_token_id=FILE_MARK,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def warm_up(step: int) -> float:
    """The factor on the learning rate at a step: it rises to 1 over ``WARM_UP_STEPS``."""
    return min(1.0, (step + 1) / WARM_UP_STEPS)


def read_corpus() -> Tensor:
    """The first ``CORPUS_BYTES`` of the standard library's sources, in path order, as int16 tokens."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages"}
    sources = sorted(
        (path for path in stdlib.rglob("*.py") if not skipped & set(path.relative_to(stdlib).parts)),
        key=lambda path: path.relative_to(stdlib).as_posix(),
    )
    tokens: list[Tensor] = []
    num_bytes = 0
    for path in sources:
        content = bytearray(path.read_bytes()[: CORPUS_BYTES - num_bytes])
        if content:
            tokens += [
                torch.tensor([FILE_MARK], dtype=torch.int16),
                torch.frombuffer(content, dtype=torch.uint8).short(),
            ]
        num_bytes += len(content)
        if num_bytes == CORPUS_BYTES:
            break
    return torch.cat(tokens)


class ByteWindows(Dataset[dict[str, Tensor]]):
    """The corpus in windows of ``WINDOW`` tokens; the last ``HELD_OUT_WINDOWS`` of them are never trained on."""

    def __init__(self, split: Literal["train", "held_out"]) -> None:
        corpus = read_corpus()
        windows = corpus[: len(corpus) // WINDOW * WINDOW].view(-1, WINDOW)
        self.windows = windows[:-HELD_OUT_WINDOWS] if split == "train" else windows[-HELD_OUT_WINDOWS:]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}
