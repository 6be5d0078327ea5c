"""Completion: the script that a shell loads, and what the server knows of ids and environments.

A key press must not wait: the server is asked for a second at most (`DSEC_COMPLETE_S`), and silence is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re

import click
from click.shell_completion import CompletionItem, get_completion_class

from dsec.errors import DsecError

_ID = re.compile(r"[a-z0-9]{24}")
_PATIENCE_S = 1.0


def _patience_s() -> float:
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ["DSEC_COMPLETE_S"])
    return _PATIENCE_S


def is_id(text: str) -> bool:
    """Whether it can be a sandbox's id."""
    return _ID.fullmatch(text) is not None


class Known(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Text that the server can complete."""

    name = "text"

    def __init__(self, *, sandboxes: bool = False, environments: bool = False, after: str = "") -> None:
        """`after`: what goes on behind an id."""
        self._sandboxes = sandboxes
        self._environments = environments
        self._after = after

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            found = asyncio.run(self._ask())
        except (DsecError, OSError):
            return []
        return [CompletionItem(value, help=about) for value, about in found if value.startswith(incomplete)]

    async def _ask(self) -> list[tuple[str, str]]:
        from dsec import AsyncClient

        found: list[tuple[str, str]] = []
        async with AsyncClient(retry_s=0.0) as client:
            if self._sandboxes:
                for info in await client.list(limit=200, request_timeout_s=_patience_s()):
                    found.append((info.id + self._after, f"{info.spec.environment} {info.state}"))
            if self._environments:
                for name in await client.environments(request_timeout_s=_patience_s()):
                    found.append((name, "environment"))
        return found


SANDBOX = Known(sandboxes=True)
ENVIRONMENT = Known(environments=True)
ENVIRONMENT_OR_SANDBOX = Known(sandboxes=True, environments=True)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  eval "$(dsec completion bash)"     in ~/.bashrc
    zsh:   eval "$(dsec completion zsh)"      in ~/.zshrc, after compinit
    fish:  dsec completion fish > ~/.config/fish/completions/dsec.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(context.find_root().command, {}, "dsec", "_DSEC_COMPLETE")
    click.echo(source.source_template % source.source_vars())


COMMANDS: tuple[click.Command, ...] = (completion,)
