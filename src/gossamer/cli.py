"""The `gossamer` command: which commands there are, and what their failures look like.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 3 the run failed; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from gossamer.commands import (
    certs,
    compare,
    goodput,
    inspect,
    launch,
    model,
    processes,
    report,
    rounds,
    syncer,
    topology,
    train,
)
from gossamer.errors import ConfigError, GossamerError, Interrupted

USER_MISTAKE, RUN_FAILED, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141

# Newer typers carry a click of their own, so its base error is found through typer.
ClickException: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="gossamer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help=(
        "Train one model on machines that are joined by thin links, simulated in virtual time.\n\n"
        "Start with `gossamer demo`. Exit codes: 0 done, 2 a mistake in what was asked, "
        "3 the run failed, 130 interrupted (and can be resumed)."
    ),
)
plan = typer.Typer(
    no_args_is_help=True,
    help="What a run would cost, without training.",
    rich_markup_mode="markdown",
)

app.command()(compare.demo)
app.command()(train.train)
app.command()(compare.compare)
app.add_typer(plan, name="plan")
plan.command("time")(compare.plan_time)
plan.command("goodput")(goodput.plan_goodput)
plan.command("rounds")(rounds.plan_rounds)
app.command()(model.sample)
app.command()(model.sensitivity)
app.command()(report.report)
app.command()(topology.topology)
app.command()(inspect.methods)
app.command()(inspect.doctor)
app.command()(launch.launch)
app.command()(processes.coordinator)
app.command()(processes.worker)
app.command()(syncer.syncer)
app.command()(certs.certs)


@app.callback()
def gossamer() -> None:
    """Keep `gossamer` a group, whose help is the app's."""


@plan.callback()
def plan_group() -> None:
    """What a run would cost, without training."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: run a command and exit with its code."""
    _replace_closed_streams()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; typed failures become lines on stderr."""
    try:
        code = app(args=arguments if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # click and rich exit where nobody reads any more
        _silence_stdout()
        return BROKEN_PIPE
    except ConfigError as error:
        return _fail("error", error, USER_MISTAKE)
    except Interrupted as error:
        return _fail("interrupted", error, INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED  # what there is to say was said where it happened
    except (GossamerError, OSError) as error:
        return _say("\n".join([f"error: {error}", *_notes(error)]), RUN_FAILED)
    except ClickException as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        # No message: the help was shown, as nothing was asked for.
        return _say(f"error: {_one_line(message or 'a command is missing')}", USER_MISTAKE)
    return code if isinstance(code, int) else 0


def _fail(kind: str, error: BaseException, code: int) -> int:
    return _say("; ".join(_one_line(part) for part in [f"{kind}: {error}", *_notes(error)]), code)


def _notes(error: BaseException) -> list[str]:
    """What was added to an error on its way: where its files are, how to go on, its trace."""
    return getattr(error, "__notes__", [])


def _say(line: str, code: int) -> int:
    sys.stderr.write(line + "\n")
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _replace_closed_streams() -> None:
    """Give a program that was started without stdout or stderr one that leads nowhere.

    Otherwise the first file that it opens would get their number, and their output.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (to the end)
            setattr(sys, name, stream)


def _silence_stdout() -> None:
    """Nobody reads any more: let the interpreter's last flush go nowhere instead of failing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
