"""Plain PyTorch: a single process or torch.distributed."""

from ..batches import check_first_batch as check_first_batch
from ..ranks import make_mesh as make_mesh
from .adapter import clip_grad_norm_ as clip_grad_norm_
from .adapter import initialize as initialize
from .pipeline import PipelineModel as PipelineModel
