"""A progress bar on a terminal, now and then a line where the output goes to a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress(title: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[int, str], None]]:
    """Yields ``update(done, note)``, to be called with the number of steps done and a word about the last one."""
    console = Console()
    if not enabled:
        yield lambda done, note: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=total, note="")
            yield lambda done, note: bar.update(task, completed=done, note=note)
    else:
        lines = max(1, total // 10)
        printed = 0

        def print_line(done: int, note: str) -> None:
            nonlocal printed
            if done >= printed + lines or (done == total and printed < total):
                printed = done
                print(f"{title}: {done}/{total} {note}", flush=True)

        yield print_line
