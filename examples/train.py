"""Train a small GPT-2 with DeepSpeed.

deepspeed --num_gpus 1 examples/train.py --deepspeed_config examples/ds_zero1.json --out out/losses.jsonl
"""

import argparse
import contextlib
import json
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from bytes_gpt import ByteWindows, build_model, warm_up
from deepspeed.utils import RepeatingLoader
from progress import progress


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with DeepSpeed.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the loss of each step, one JSON object a line")
    parser.add_argument("--save", type=Path, help="folder for a DeepSpeed checkpoint at the end")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = build_model(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up),
        training_data=ByteWindows("train"),
    )
    batches = iter(RepeatingLoader(loader))
    first_rank = dist.get_rank() == 0

    with contextlib.ExitStack() as stack:
        update = stack.enter_context(progress("train", args.steps, enabled=first_rank))
        log = None
        if first_rank and args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(args.out.open("w"))

        for step in range(args.steps):
            step_loss = torch.zeros((), device=engine.device)
            for _ in range(engine.gradient_accumulation_steps()):
                batch = {name: tensor.to(engine.device) for name, tensor in next(batches).items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                step_loss += loss.detach() / engine.gradient_accumulation_steps()
            dist.all_reduce(step_loss)
            mean_loss = step_loss.item() / dist.get_world_size()
            update(step + 1, f"loss {mean_loss:.4f}")
            if log:
                print(json.dumps({"step": step, "loss": mean_loss}), file=log, flush=True)

    if args.save:
        engine.save_checkpoint(str(args.save))


if __name__ == "__main__":
    main()
