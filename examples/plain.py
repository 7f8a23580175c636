"""The training of train.py in one process, with nothing but PyTorch and transformers: what the demo compares with.

python examples/plain.py --out out/losses.jsonl --save out/plain
"""

import argparse
import json
from pathlib import Path

import torch
from bytes_gpt import ByteWindows, build_model, warm_up
from progress import progress
from torch.utils.data import DataLoader, DistributedSampler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 in one process.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="samples per step (default: %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to train (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, help="file for the loss of each step, one JSON object a line"
    )
    parser.add_argument("--save", type=Path, required=True, help="Hugging Face folder to write at the end")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = build_model(args.seed).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    dataset = ByteWindows("train")
    # deepspeed.initialize(training_data=...) draws the samples in the order of this sampler
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    if args.steps > len(loader):
        raise SystemExit(f"--steps {args.steps}: the data ends after {len(loader)} batches of {args.batch_size}")

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as log, progress("train", args.steps) as update:
        for step, batch in zip(range(args.steps), loader, strict=False):
            loss = model(**{name: tensor.to(args.device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            update(step + 1, f"loss {loss.item():.4f}")
            print(json.dumps({"step": step, "loss": loss.item()}), file=log, flush=True)
    model.save_pretrained(args.save)


if __name__ == "__main__":
    main()
