"""The python function of a graph: its text, compiled, and shown line by line in tracebacks."""

from __future__ import annotations

import hashlib
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

# The end of a generated line: values that are not used any more.
_DELETIONS = re.compile(r";  ((?:\w+ = )+)None$", re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """The text of a graph's function and the objects that it names. Equal codes compute the same.

    ``label`` says in tracebacks what the text is of.
    """

    text: str
    names: tuple[tuple[str, Any], ...]
    label: str = field(compare=False)

    def function(self) -> Callable[..., Any]:
        """A plain function; its ``__partbook_source__`` is the text."""
        # The file name is made from the text, so that one text is kept once, in every process under the same name.
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        file = f"<partbook {self.label} {digest}>"
        # Without a time of change, linecache never looks for the file on disk.
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        # No __name__: torch.compile would import a module of that name.
        names = dict(self.names)
        # dont_inherit: the annotations of this file's future would become text, which TorchScript does not read.
        exec(compile(self.text, file, "exec", dont_inherit=True), names)
        function = names["forward"]
        function.__partbook_source__ = self.text
        return function


def code_of(graph: fx.Graph, label: str) -> Code:
    """The code of ``graph``; its text and names depend on nothing but the graph."""
    code = graph.python_code("self")
    # fx sees no use of "self" in self.weight, and would delete it after the last call that it is an argument of.
    text = _DELETIONS.sub(_keep_self, code.src).strip() + "\n"
    return Code(text, tuple(code.globals.items()), label)


def compile_graph(graph: fx.Graph, label: str) -> Callable[..., Any]:
    """``graph``, whose first placeholder is ``self``, as a function ``fn(self, *inputs)`` that returns what the output
    node holds. Later changes of the graph do not reach it."""
    return code_of(graph, label).function()


class NoSelf(CodeGen):
    """Code of a graph that has no placeholder ``self``: fx would add that argument."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        return f"def forward({', '.join(free_vars)}){maybe_return_annotation}:"


def _keep_self(found: re.Match[str]) -> str:
    names = [name for name in found[1].split(" = ") if name and name != "self"]
    return f";  {' = '.join([*names, 'None'])}" if names else ""
