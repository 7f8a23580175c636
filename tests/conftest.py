"""Test this checkout and no other copy of Partbook, in child processes too; skip what needs an accelerator."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    paths = [str(ROOT / ".dev"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    imported_from = folder_of("partbook.core")
    if imported_from != ROOT / "core":
        raise pytest.UsageError(
            f"partbook.core comes from {imported_from}, not from this checkout: run pytest in {ROOT}, "
            "and remove a stale copy with `pip uninstall partbook`"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under ``-n 2``: tests that start processes run one after the other, beside them the files of the others."""
    for item in items:
        starts_processes = item.path.parent.name in ("distributed", "launchers", "tests")
        item.add_marker(pytest.mark.xdist_group("processes" if starts_processes else item.path.stem))


def folder_of(package: str) -> Path | None:
    """Where ``import package`` would find it, without running its code; None when it would not."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    locations = spec and spec.submodule_search_locations
    return Path(next(iter(locations))).resolve() if locations else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("needs an accelerator, and torch.accelerator.is_available() is False")
