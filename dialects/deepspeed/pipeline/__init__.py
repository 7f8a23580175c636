"""Stages in DeepSpeed's own PipelineEngine: its schedule, optimizer and checkpoints; our micro-batches and wires."""

from .engine import attach as attach
from .feed import EndOfData as EndOfData
from .feed import Feed as Feed
from .module import StageModule as StageModule
