"""Every Python block of the README and the guide runs, top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": f"page_{page.stem}"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        # Blank lines, so that a traceback shows the line of the page.
        code = "\n" * text[: match.start(1)].count("\n") + match.group(1)
        exec(compile(code, str(page), "exec"), namespace)


def test_own_primitive_takes_at_most_40_lines():
    text = (ROOT / "docs" / "guide.md").read_text()
    section = text.split("## 3. Your own primitive")[1].split("## 4.")[0]
    [block] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 40
