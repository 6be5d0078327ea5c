"""What a person sees: header, progress, tables, footer. Colours and progress on a terminal; plain text, a line a fact,
when piped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsec.rollout.controls import Control
from dsec.rollout.step import Created, Row, Step, Task

_PLAIN_WIDTH = 200


def make_console(*, quiet: bool = False) -> Console:
    """On stdout; wide and colourless when that is no terminal. `quiet`: says nothing."""
    console = Console(highlight=False, quiet=quiet)
    if console.is_terminal:
        return console
    return Console(highlight=False, quiet=quiet, width=_PLAIN_WIDTH, no_color=True, emoji=False)


class Screen:
    """Shows the step as it goes; implements `step.Watch`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._phase = ""

    def header(self, task: Task, facts: Iterable[tuple[str, str]], features: Iterable[tuple[str, bool, str]]) -> None:
        """What runs where, and under what isolation."""
        print_ = self.console.print
        print_("[bold]dsec: one step of agentic RL[/bold]")
        project, burst = task.project, task.burst
        print_(f"  project    {project.name} {project.version}")
        print_(f"  sha256     {project.sha256}")
        print_(f"  fault      {burst.fault.name}: {burst.fault.what} ({burst.fault.broken} tests fail)")
        print_(f"  seed       {burst.seed}  ({len(burst.candidates)} candidates; the same seed, the same rewards)")
        for name, value in facts:
            print_(f"  {name:10} {value}")
        print_("  isolation, as seen from inside a sandbox:")
        for feature, on, detail in features:
            mark = "[green]on [/green]" if on else "[red]OFF[/red]"
            print_(f"    {mark} {feature}" + (f" [dim]({detail})[/dim]" if detail else ""))

    def creating(self, done: int, total: int) -> None:
        self._show("creating", done, total)

    def created(self, created: Created) -> None:
        self._finish()
        self.console.print(
            f"[bold]{created.count} created in {created.wall_s:.2f} s[/bold]: "
            f"{created.count / created.wall_s:.0f} a second, "
            f"each p50 {created.p50_ms:.1f} ms, p99 {created.p99_ms:.1f} ms"
        )

    def grading(self, done: int, total: int) -> None:
        self._show("testing and grading", done, total)
        if done == total:
            self._finish()

    def step(self, step: Step, *, every: bool) -> None:
        """The table of candidates: one line of each kind and all surprises, or every one."""
        rows = step.rows if every else _one_of_each(step.rows)
        kinds = Counter(row.candidate for row in step.rows)
        table = _table(
            "candidate", "n", "own run", "passed", "failed", "reward", "expected", "cause", "infra", "CPU s", "id"
        )
        for row in rows:
            graded = row.reward is not None
            table.add_row(
                row.candidate,
                f"{kinds[row.candidate]}",
                row.own,
                f"{row.passed}" if graded else "-",
                f"{row.failed}" if graded else "-",
                _reward(row.reward),
                _reward(row.expected),
                str(row.cause),
                "yes" if row.infra else "no",
                f"{row.cpu_s:.2f}",
                row.id,
                style="bold red" if row.surprise else None,
            )
        self._print_whole(table)
        for row in rows:
            if row.surprise:
                self.console.print(f"[red]surprise[/red]: {row.candidate} ({row.id}): {row.message or 'see its line'}")
        infra = sum(row.infra for row in step.rows)
        mean = "none" if step.mean is None else f"{step.mean:.4f}"
        self.console.print(
            f"{len(step.rows)} candidates tested and graded in {step.graded_s:.1f} s; "
            f"mean reward [bold]{mean}[/bold] over {len(step.rows) - infra}, {infra} masked as infra"
        )

    def controls(self, controls: Sequence[Control]) -> None:
        """The table of controls."""
        table = _table("control", "must be and is", "", "CPU s", "id")
        for control in controls:
            said = f"{control.found} instead of {control.expected}" if control.surprise else control.found
            mark = "WRONG" if control.surprise else "ok"
            style = "bold red" if control.surprise else None
            table.add_row(control.name, said, mark, f"{control.cpu_s:.2f}", control.id, style=style)
        self._print_whole(table)

    def facts(self, facts: Iterable[tuple[str, bool, str]]) -> None:
        """Checks, each good or not."""
        for name, good, detail in facts:
            mark = "[green]ok[/green]" if good else "[bold red]WRONG[/bold red]"
            self.console.print(f"  {mark} {name}" + (f": {detail}" if detail else ""))

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Something that takes a while: a spinner with the latest word on a terminal, a line a word when piped."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda word: self.say(f"  {word}")
            return
        with self.console.status(text) as status:
            yield lambda word: status.update(f"{text}: [dim]{escape(word)}[/dim]")

    def _print_whole(self, table: Table) -> None:
        """Nothing in a table is cut: a narrow terminal wraps its lines."""
        width = self.console.width
        wide = self.console.options.update(width=_PLAIN_WIDTH)
        self.console.width = max(width, self.console.measure(table, options=wide).maximum)
        try:
            self.console.print(table, crop=False)
        finally:
            self.console.width = width

    def _show(self, phase: str, done: int, total: int) -> None:
        if not self.console.is_terminal or os.environ.get("TERM") == "dumb":
            return
        if self._progress is None or self._phase != phase:
            self._finish()
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.start()
            self._bar, self._phase = self._progress.add_task(phase, total=total), phase
        if self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def _finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._bar = None

    close = _finish


def _one_of_each(rows: Sequence[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.candidate, row)
    shown = [*first.values(), *(row for row in rows if row.surprise and first[row.candidate] is not row)]
    return sorted(shown, key=lambda row: (-(row.expected if row.expected is not None else 2), row.candidate))


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True, justify="right" if name in {"n", "passed", "failed", "CPU s"} else "left")
    return table
