"""The primitives, one file each."""

from .annotate import Annotate as Annotate
from .annotate import SetAttribute as SetAttribute
from .checkpoint import Checkpoint as Checkpoint
from .cut import CutPipelineStage as CutPipelineStage
from .decompose import Decompose as Decompose
from .fork_rng import ForkRng as ForkRng
from .fuse import Fuse as Fuse
from .replace import Replace as Replace
from .replace import ReplaceAll as ReplaceAll
from .shard import Shard as Shard
from .shard_loss import ShardLoss as ShardLoss
from .sync import Sync as Sync
from .trace import Trace as Trace
