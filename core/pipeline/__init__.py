"""Stages: a model cut into pieces that run one after the other, each on a rank of its own."""

from .pipeline import Pipeline as Pipeline
from .pipeline import refuse_unknown as refuse_unknown
from .split import Part as Part
from .split import SplitError as SplitError
from .split import Value as Value
from .stages import Stage as Stage
from .stages import StageTie as StageTie
from .stages import release as release
from .wiring import Instance as Instance
from .wiring import Wiring as Wiring
