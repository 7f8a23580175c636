"""An ordinary transformers Trainer script without a word of Partbook: trains, evaluates, predicts and saves."""

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY = 99


def samples(count, seed):
    """Ids with labels that are left out in different numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(VOCABULARY, (10,), generator=generator)
        ids[:3] = torch.tensor([0, VOCABULARY // 2, VOCABULARY - 1])
        labels = ids.clone()
        labels[: index % 7] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed", help="a config file")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--evaluation-samples", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    arguments = TrainingArguments(
        str(options.out),
        deepspeed=options.deepspeed,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.micro_batch,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        seed=3,
    )
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, **rates, **ends)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model, arguments, train_dataset=samples(24, 1), eval_dataset=samples(options.evaluation_samples, 2)
    )
    trainer.train()
    logged = trainer.state.log_history
    found = {
        "losses": [entry["loss"] for entry in logged if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in logged if "grad_norm" in entry],
        "evaluation": trainer.evaluate()["eval_loss"],
    }
    # of the first and the last token of the vocabulary
    found["logits"] = trainer.predict(trainer.eval_dataset).predictions[..., [0, -1]].tolist()
    trainer.save_model()
    (options.out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))

    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        import deepspeed

        # partitions the parameters before DeepSpeed has the model
        model = GPT2LMHeadModel._from_config(config)
        deepspeed.initialize(model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}})


if __name__ == "__main__":
    main()
