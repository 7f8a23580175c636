"""DeepSpeed: ``initialize`` as DeepSpeed's own, with a schedule; ZeRO 0 to 3 under tensor parallelism."""

from ..arguments import add_schedule_arguments as add_schedule_arguments
from .adapter import initialize as initialize
from .config import ConfigError as ConfigError
from .weights import consolidate as consolidate
from .weights import gradients as gradients
from .weights import save_pretrained as save_pretrained
from .weights import scheduled_of as scheduled_of
