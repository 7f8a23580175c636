"""An ordinary DeepSpeed script without a word of Partbook: the same model trained three times, with data given out in
the three usual ways."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import beside  # noqa: F401
import deepspeed
import torch
import torch.distributed as dist
from deepspeed import initialize
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 99
MICRO_BATCH = 2
STEPS = 3


class Tokens(Dataset):
    """16 samples; the first tokens are the ends and the middle of the vocabulary."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        ids[:3] = torch.tensor([0, VOCABULARY // 2, VOCABULARY - 1])
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"index": index, "input_ids": ids, "labels": labels}


def build(seed):
    torch.manual_seed(seed)
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, **rates))


def train(engine, loader):
    losses, seen = [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        seen.append(batch.pop("index").tolist())
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "seen": seen}


def die(engine, loader, folder):
    """End this process in the middle of a step, when its peers wait for it."""

    def end(*_):
        (folder / "died").write_text(str(time.time()))
        os._exit(7)

    engine.module.transformer.h[1].register_forward_pre_hook(end)
    train(engine, loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    # of the script's own
    parser.add_argument("--schedule", default="none")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--die", type=int, default=-1, help="the rank that does")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Tokens()
    found = {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "main": vars(sys.modules["__main__"]) is globals(),
        "path": sys.path[0],
        "local_rank": args.local_rank,
        "own": [args.schedule, args.tp],
        "sizes": [rank, world],
    }

    model = build(seed=0)
    engine, _, loader, _ = deepspeed.initialize(args, model, None, model.parameters(), data)
    found["training_data"] = train(engine, loader)

    # every rank with a seed of its own: rank 0's weights count
    model = build(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
    found["sampler"] = train(engine, DataLoader(data, MICRO_BATCH, sampler=DistributedSampler(data)))

    model = build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config_params=args.deepspeed_config)
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False)
    loader = DataLoader(data, MICRO_BATCH, sampler=sampler)
    found["explicit"] = train(engine, loader)

    args.out.mkdir(exist_ok=True)
    (args.out / f"{rank}.json").write_text(json.dumps(found))
    if args.die >= 0:
        die(engine, loader, args.out) if rank == args.die else train(engine, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
