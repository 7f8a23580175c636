"""Stages: a model cut into pieces that run one after the other, each on a rank of its own."""

from .balance import MEASURES as MEASURES
from .cutting import Placement as Placement
from .cutting import pipeline_of as pipeline_of
from .cutting import rank_of as rank_of
from .in_order import run_in_order as run_in_order
from .pipeline import Pipeline as Pipeline
from .pipeline import refuse_unknown as refuse_unknown
from .split import Part as Part
from .split import SplitError as SplitError
from .split import Value as Value
from .stages import Stage as Stage
from .stages import StageTie as StageTie
from .stages import holdings_of as holdings_of
from .stages import release as release
from .stages import share as share
from .stages import subtree as subtree
from .wiring import Instance as Instance
from .wiring import Wiring as Wiring
