"""The repository's own rules: which folder may import what, what is packaged, and how long a file may be."""

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "dialects", "schedules", "launchers")
MAY_IMPORT = {
    "core": {"core"},
    "schedules": {"core", "schedules"},
    "dialects": {"core", "dialects"},
    "launchers": set(FOLDERS),
}
FRAMEWORKS = ("deepspeed", "megatron")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
names = lambda paths: [str(path.relative_to(ROOT)) for path in paths]  # noqa: E731


def imports(path: Path, text: str | None = None) -> Iterator[tuple[str, str]]:
    """(place, absolute module name) of every import in a file of the four folders, also inside functions."""
    package = ["partbook", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(text or path.read_text())):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from ((place, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            # "from . import x" names modules, "from .x import y" names one
            found = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((place, ".".join([*base, name])) for name in found)
        elif isinstance(node, ast.ImportFrom):
            found = [f"partbook.{alias.name}" for alias in node.names] if node.module == "partbook" else [node.module]
            yield from ((place, str(name)) for name in found)
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            yield from ((place, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def wrong_imports(path: Path, text: str | None = None) -> list[str]:
    folder, *inside = path.relative_to(ROOT).parts
    found = []
    for place, module in imports(path, text):
        top, _, rest = module.partition(".")
        if top == "partbook" and rest.split(".")[0] not in MAY_IMPORT[folder]:
            found.append(f"{place}: {folder} imports {module}")
        if top in FOLDERS:
            found.append(f"{place}: {module} would be the folder, a second copy of partbook.{module}")
        if top in FRAMEWORKS and folder != "launchers" and (folder, inside[0]) != ("dialects", top):
            found.append(f"{place}: {module} belongs into dialects/{top}")
    return found


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_imports_go_one_way(path):
    assert wrong_imports(path) == []


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("core/x.py", "from partbook.schedules import gpt2", "core/x.py:1: core imports partbook.schedules"),
        ("core/primitives/x.py", "from ...dialects import a", "core/primitives/x.py:1: core imports partbook.dialects"),
        ("core/x.py", "from .. import launchers", "core imports partbook.launchers"),
        ("core/x.py", "from partbook import dialects", "core imports partbook.dialects"),
        (
            "core/x.py",
            "def f():\n    import deepspeed.comm",
            "core/x.py:2: deepspeed.comm belongs into dialects/deepspeed",
        ),
        ("core/x.py", "importlib.import_module('megatron.core')", "belongs into dialects/megatron"),
        ("schedules/x.py", "import partbook.dialects.pytorch", "schedules imports partbook.dialects.pytorch"),
        (
            "dialects/pytorch/x.py",
            "from partbook.schedules.gpt2 import gpt2",
            "dialects imports partbook.schedules.gpt2",
        ),
        ("dialects/pytorch/x.py", "import deepspeed", "deepspeed belongs into dialects/deepspeed"),
        ("dialects/ranks.py", "import megatron", "megatron belongs into dialects/megatron"),
        ("launchers/x.py", "import core", "core would be the folder"),
        ("launchers/x.py", "from core.mesh import Mesh", "core.mesh would be the folder"),
    ],
)
def test_a_wrong_import_would_be_found(path, text, found):
    assert [line for line in wrong_imports(ROOT / path, text) if found in line]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/primitives/x.py", "from ..mesh import Mesh\nfrom . import shard\nimport torch"),
        ("dialects/deepspeed/x.py", "import deepspeed\nfrom partbook.core import Mesh\nfrom ..ranks import a"),
        (
            "launchers/x.py",
            "import deepspeed\nfrom partbook.dialects import pytorch\nfrom partbook.schedules import gpt2",
        ),
        ("schedules/x.py", "from partbook.core import Mesh\nfrom .fused import Part"),
    ],
)
def test_a_right_import_would_not(path, text):
    assert wrong_imports(ROOT / path, text) == []


@pytest.mark.parametrize("folder", ["core", "schedules"])
def test_no_framework_is_named_outside_its_dialect(folder):
    """In code: names and text; what a comment or docstring cites as its source may name Megatron."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if docstring:
                node.value.value = ""
        code = ast.unparse(tree).lower() if folder == "core" else path.read_text().lower()
        found += [f"{path.relative_to(ROOT)}: {word}" for word in FRAMEWORKS if word in code]
    # the one hint for a user who holds an engine
    assert set(found) <= {"core/consolidate.py: deepspeed"}


def test_every_package_is_listed_and_no_other():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    folders = [path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(["partbook", *folder.relative_to(ROOT).parts]) for folder in folders)
    assert {path.parent for path in FILES} == set(folders)
    points = [line.split(" = ") for name in ("dialects", "schedules")
              for line in setup["options.entry_points"][f"partbook.{name}"].strip().splitlines()]  # fmt: skip
    for name, module in points:
        place = ROOT / Path(*module.split(".")[1:])
        assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), f"{name} = {module}"


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_a_family_takes_at_most_sixty_lines(name):
    assert len((ROOT / "schedules" / f"{name}.py").read_text().splitlines()) <= 60


def test_no_file_is_longer_than_four_hundred_lines():
    places = [
        *FILES,
        *(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")),
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in places}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_file_says_what_it_is_for():
    assert [
        name
        for name, path in zip(names(FILES), FILES, strict=True)
        if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []
