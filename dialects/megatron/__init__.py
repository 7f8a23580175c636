"""Megatron-Core: a model provider whose modules Megatron's schedules, DDP, optimizer and checkpoints drive."""

try:
    import megatron.core as _megatron_core  # noqa: F401
except ImportError as error:
    raise ImportError(
        "partbook.dialects.megatron needs megatron-core: pip install 'megatron-core>=0.16.1'", name="megatron.core"
    ) from error

from ..arguments import add_schedule_arguments as add_schedule_arguments
from ..arguments import schedule_options as schedule_options
from .checkpoints import CheckpointError as CheckpointError
from .checkpoints import load_checkpoint as load_checkpoint
from .checkpoints import save_checkpoint as save_checkpoint
from .config import ConfigError as ConfigError
from .config import transformer_config as transformer_config
from .cpu import on_cpu as on_cpu
from .layers import parallel_layers as parallel_layers
from .provider import ModelProvider as ModelProvider
from .provider import model_provider as model_provider
from .stage import StageModel as StageModel
from .weights import consolidate as consolidate
from .weights import gradients as gradients
from .weights import save_pretrained as save_pretrained
from .weights import scheduled_of as scheduled_of
