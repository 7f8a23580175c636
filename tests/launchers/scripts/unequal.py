"""A DeepSpeed script that divides its data by the global rank, so that tp groups see different batches."""

import os

import deepspeed
from loop import Tokens, build

data = Tokens()
model = build(seed=0)
config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
sample = data[int(os.environ["RANK"])]
engine(input_ids=sample["input_ids"][None], labels=sample["labels"][None])
