"""Every Python block of the README and the docs runs, top to bottom, and prints what the text block after it says."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = page.read_text()
    namespace = {"__name__": f"page_{page.stem}"}
    printed = ""
    for match in re.finditer(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        language, block = match.groups()
        if language == "text":
            assert block == printed
            continue
        # Blank lines, so that a traceback shows the line of the page.
        code = compile("\n" * text[: match.start(2)].count("\n") + block, str(page), "exec")
        file = re.match(r"# (\w+)\.py\n", block)
        if file:
            # Part of a file: the page goes on with its names, other processes import it.
            with open(f"{file[1]}.py", "a") as saved:
                saved.write(block)
            if file[1] not in sys.modules:
                monkeypatch.setitem(sys.modules, file[1], ModuleType(file[1]))
            exec(code, vars(sys.modules[file[1]]))
            namespace |= vars(sys.modules[file[1]]) | {"__name__": namespace["__name__"]}
        else:
            exec(code, namespace)
        printed = capsys.readouterr().out


def test_own_primitive_takes_at_most_40_lines():
    text = (ROOT / "docs" / "guide.md").read_text()
    section = text.split("## 3. Your own primitive")[1].split("## 4.")[0]
    [block] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 40
