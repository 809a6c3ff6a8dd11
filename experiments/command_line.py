"""Flags whose mistakes get one clear line each, for all entry points; imports no JAX."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags


def stop(message: str) -> NoReturn:
    """Ends the program with one line on stderr, the program's name first, and exit code 1."""
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")


def quit_on_signals(what_now: str) -> None:
    """Makes SIGINT and SIGTERM end the program at once with one line and exit code 128 + signal.

    KeyboardInterrupt would not do while a program starts: libraries swallow it in their callbacks.

    what_now: the end of the line.
    """

    def quit_now(number, _):
        print(f"{Path(sys.argv[0]).stem}: interrupted; {what_now}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, quit_now)


def parse(argv: list[str], others: Sequence[str] = ()) -> list[str]:
    """Parses the command line, for `absl.app.run(main, flags_parser=parse)`.

    Exits with one line when a flag is missing, unknown or has a wrong value. The help text of a flag must
    say what is expected, as in "a number of at least 1".

    others: names of flags to list as known that are not defined yet.
    """
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        stop(_unknown_flag(error.flagname, others))
    except flags.Error as error:
        stop(_flag_error(str(error)))


def _unknown_flag(name: str, others: Sequence[str]) -> str:
    modules = flags.FLAGS.flags_by_module_dict()
    known = [flag.name for module, own in modules.items() if not module.startswith("absl") for flag in own]
    known = sorted(flag for flag in {*known, *others} if "." not in flag)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" did you mean --{near[0]}?" if near else ""
    return f"unknown flag --{name};{hint} known: {', '.join(f'--{flag}' for flag in known)}"


def _flag_error(message: str) -> str:
    missing = re.match(r"flag --(\w+)=None: Flag --\1 must|Missing value for flag --?(\w+)$", message)
    if missing and (name := missing[1] or missing[2]) in flags.FLAGS:
        return f"--{name} is missing; expected {flags.FLAGS[name].help}"
    if (wrong := re.match(r"flag --(\w+)=(.*?): ", message, re.DOTALL)) and wrong[1] in flags.FLAGS:
        return f"--{wrong[1]} is {wrong[2]!r}; expected {flags.FLAGS[wrong[1]].help}"
    return " ".join(message.split())
