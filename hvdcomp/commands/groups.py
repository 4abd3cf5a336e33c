"""Groups of commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hvdcomp.specs.suggestions import did_you_mean


class Group(click.Group):
    """A group that says what a command that does not exist may have been meant to be."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name[:1].isalnum() and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            ctx.fail(f"there is no command {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group that lists commands without importing them, so that its `--help` needs nothing that they need.

    Args:
        lazy: by name of a command, its module in `hvdcomp.commands`, its name there, and a line of help.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str, str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, name, _ = self._lazy[cmd_name]
        return getattr(importlib.import_module(f"hvdcomp.commands.{module}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][2]) for name in self.list_commands(ctx)])
