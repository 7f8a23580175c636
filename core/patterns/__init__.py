"""Find subgraphs by pattern: a pattern is an ordinary function over torch operations."""

from .operation import Attribute as Attribute
from .pattern import PatternError as PatternError
from .pattern import matches_glob as matches_glob
from .pattern import module as module
from .search import Found as Found
from .search import find_pattern as find_pattern
from .search import nearest_miss as nearest_miss
