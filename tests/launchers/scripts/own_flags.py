"""A DeepSpeed script that takes Partbook's flags itself; one of its ranks raises in the middle of a step."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from loop import MICRO_BATCH, STEPS, Tokens, build
from torch.utils.data import DataLoader

from partbook.dialects.deepspeed import add_schedule_arguments, consolidate, initialize


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    add_schedule_arguments(deepspeed.add_config_arguments(parser))
    args = parser.parse_args()

    model = build(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = initialize(args=args, model=model, optimizer=optimizer)
    losses = []
    for step, batch in enumerate(DataLoader(Tokens(), MICRO_BATCH)):
        if step == STEPS:
            break
        del batch["index"]
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    shapes = {name: list(tensor.shape) for name, tensor in consolidate(engine).items()}
    linear = type(engine.module.transformer.h[0].attn.c_attn).__name__
    args.out.mkdir(exist_ok=True)
    content = {
        "losses": losses,
        "shapes": shapes,
        "c_attn": linear,
        "args": [args.schedule, args.tp, args.schedule_arg],
    }
    (args.out / f"{engine.global_rank}.json").write_text(json.dumps(content))

    def fail(*_):
        raise LookupError(f"rank {engine.global_rank} has had enough")

    if engine.global_rank == 1:
        engine.module.transformer.h[1].register_forward_pre_hook(fail)
    engine(**batch)


if __name__ == "__main__":
    main()
