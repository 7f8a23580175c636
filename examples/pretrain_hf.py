"""Megatron-LM's usual main with a transformers model in the place of its own.

    PYTHONPATH=Megatron-LM python -m partbook.launchers.megatron --nproc-per-node 4 --schedule llama \
        examples/pretrain_hf.py --hf-model path/to/hf_folder --tensor-model-parallel-size 2 ...

The flags after the script are those of Megatron-LM's pretrain_gpt.py (0.16), whose data and loss it uses too; sizes
must be those of the model. The folder's weights are what training starts from; of a folder that has only a config, the
seed's.
"""

import functools
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from pretrain_gpt import forward_step, train_valid_test_datasets_provider
from transformers import AutoConfig, AutoModelForCausalLM

from partbook.dialects.megatron import ModelProvider, add_schedule_arguments, model_provider, schedule_options


def add_arguments(parser):
    parser.add_argument("--hf-model", required=True, help="a Hugging Face folder: a config, and weights to start from")
    return add_schedule_arguments(parser, sizes=False)


@functools.cache
def provider() -> ModelProvider:
    args = get_args()

    def build_model() -> torch.nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.hf_model))

    has_weights = any(Path(args.hf_model).glob("*.safetensors"))
    return model_provider(
        build_model,
        args.schedule,
        schedule_options(args.schedule_arg),
        cuts=args.cuts,
        weights=args.hf_model if has_weights else args.seed,
    )


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        lambda *args, **kwargs: provider()(*args, **kwargs),
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
