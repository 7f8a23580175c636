"""What watches a run on fake tensors: conditions on sizes, random numbers, torch calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .session import Session


class Shapes(ShapeEnv):
    """Reports each condition on sizes that the recorded module's own Python evaluated.

    Those that torch or a leaf evaluate do not matter: they are evaluated again whenever the graph runs.
    """

    session: Session | None = None

    def evaluate_expr(self, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = super().evaluate_expr(orig_expr, hint, *args, **kwargs)
        session = self.session
        if session is not None and session.recorder is not None and not session.is_busy:
            session.recorder.size_condition(orig_expr, value)
        return value


class Spy(TorchDispatchMode):
    """Sees below a torch call whether it draws random numbers."""

    random = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))

    @contextmanager
    def separately(self) -> Iterator[Spy]:
        """What happens inside, apart from what happened before; afterwards both count."""
        before, self.random = self.random, False
        try:
            yield self
        finally:
            self.random |= before


class Calls(TorchFunctionMode):
    """Hands each torch call of the recorded module's Python to its recorder."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._session.recorder
        if recorder is None or self._session.is_busy or self._session.is_other_thread:
            return function(*args, **(kwargs or {}))
        return recorder.call(function, args, kwargs or {})


class Mark:
    """The place in a graph where a call of the module at ``path`` has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.__name__ = self.__qualname__ = "mark"
        self.__module__ = __name__

    def __call__(self) -> None:
        """A mark does nothing."""
