"""An ordinary script of a pipeline: it hands its model to DeepSpeed and calls ``train_batch`` with dict batches."""

import argparse
import functools
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, ACCUMULATION = 3, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


def build():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 99}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def batches():
    """Padded batches, each of another length."""
    random = torch.Generator().manual_seed(1)
    for number in range(STEPS * ACCUMULATION):
        start = torch.randint(0, 99, (2, 1), generator=random)
        ids = (start + torch.arange(8 + number)) % 99
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--loop", choices=("train_batch", "plain", "dies"), default="train_batch")
    options = parser.parse_args()
    model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    data = batches()
    if options.loop == "plain":
        engine(**next(data))
    losses = []
    for step in range(STEPS):
        if options.loop == "dies" and step == 1 and os.environ["RANK"] == "1":
            engine.module.register_forward_pre_hook(functools.partial(fail, options.out))
        losses.append(float(engine.train_batch(data_iter=data)))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{os.environ['RANK']}.json").write_text(json.dumps(losses))


def fail(folder, module, inputs):
    (folder / "died").write_text(str(time.time()))
    raise RuntimeError("this rank has had enough")


if __name__ == "__main__":
    main()
