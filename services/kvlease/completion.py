"""`kvlease completion`: completion of this command in bash, zsh and fish, made from its parsers.

The scripts hold every command, verb and flag, so that a key press starts no Python.
"""

import shlex
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from kvlease.cli import COMMANDS, parser_of


@dataclass(slots=True)
class Completion:
    """What may follow a command's name.

    Attributes:
        flags: each flag with its help.
        values: what a flag takes, where it is a choice.
        verbs: subcommands, for commands that have them.
    """

    name: str
    meaning: str
    flags: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    verbs: "list[Completion]" = field(default_factory=list["Completion"])


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.epilog = (
        "bash: source <(kvlease completion bash); zsh: the same after compinit; "
        "fish: kvlease completion fish | source"
    )


def run(arguments: Namespace) -> int:
    """Prints the script."""
    commands = [completion_of(name, meaning, parser_of(name)) for name, (_, meaning) in COMMANDS.items()]
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    sys.stdout.write(scripts[arguments.shell](commands))
    return 0


def completion_of(name: str, meaning: str, parser: ArgumentParser) -> Completion:
    """What a parser knows."""
    found = Completion(name, meaning)
    for action in parser._actions:  # argparse has no public way to its actions
        for flag in action.option_strings:
            if flag.startswith("--"):
                found.flags[flag] = _first_sentence(action.help)
                if action.choices is not None:
                    found.values[flag] = tuple(map(_word, action.choices))
        if not action.option_strings and action.choices is not None:
            found.verbs.extend(_verbs(action))
    return found


def bash_script(commands: list[Completion]) -> str:
    """A function for bash's `complete`."""
    lines = [
        "_kvlease() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        f'  local words="{" ".join(command.name for command in commands)} --help --version"',
        '  [ "$COMP_CWORD" -gt 1 ] && case "${COMP_WORDS[1]}" in',
    ]
    for command in commands:
        lines += [f"    {command.name}) {_bash_words(command)};;"]
    lines += [
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _kvlease kvlease",
    ]
    return "\n".join(lines) + "\n"


def _bash_words(command: Completion) -> str:
    words = [verb.name for verb in command.verbs] + list(command.flags)
    cases = [f'words="{" ".join(words)}"']
    if any(verb.flags for verb in command.verbs):
        verbs = " ".join(f'{verb.name}) words="{" ".join(verb.flags)}";;' for verb in command.verbs)
        cases.append(f'[ "$COMP_CWORD" -gt 2 ] && case "${{COMP_WORDS[2]}}" in {verbs} esac')
    values = {flag: values for each in (command, *command.verbs) for flag, values in each.values.items()}
    if values:
        chosen = " ".join(f'{flag}) words="{" ".join(words)}";;' for flag, words in values.items())
        cases.append(f'case "$before" in {chosen} esac')
    return "; ".join(cases)


def zsh_script(commands: list[Completion]) -> str:
    """zsh runs bash's completion functions."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(commands)


def fish_script(commands: list[Completion]) -> str:
    """`complete` lines for fish."""
    lines = ["complete -c kvlease -f"]
    for command in commands:
        lines.append(_fish("__fish_use_subcommand", f"-a {command.name}", command.meaning))
        seen = f"__fish_seen_subcommand_from {command.name}"
        names = " ".join(verb.name for verb in command.verbs)
        for verb in command.verbs:
            condition = f"{seen}; and not __fish_seen_subcommand_from {names}"
            lines.append(_fish(condition, f"-a {verb.name}", verb.meaning))
            lines += _fish_flags(verb, f"{seen}; and __fish_seen_subcommand_from {verb.name}")
        lines += _fish_flags(command, seen)
    return "\n".join(lines) + "\n"


def _fish_flags(command: Completion, condition: str) -> Iterator[str]:
    for flag, meaning in command.flags.items():
        values = command.values.get(flag, ())
        chosen = f" -xa {shlex.quote(' '.join(values))}" if values else ""
        yield _fish(condition, f"-l {flag.removeprefix('--')}{chosen}", meaning)


def _fish(condition: str, what: str, meaning: str) -> str:
    return f"complete -c kvlease -n {shlex.quote(condition)} {what} -d {shlex.quote(meaning)}"


def _verbs(action: Action) -> Iterator[Completion]:
    helps = {choice.dest: choice.help or "" for choice in getattr(action, "_choices_actions", ())}
    choices = cast("Iterable[str]", action.choices)
    parsers = cast("dict[str, object]", choices) if isinstance(choices, dict) else {}
    for name in choices:
        parser = parsers.get(name)
        if isinstance(parser, ArgumentParser):
            yield completion_of(name, helps.get(name, ""), parser)
        else:
            yield Completion(_word(name), "")


def _word(choice: object) -> str:
    return str(choice.value) if isinstance(choice, Enum) else str(choice)


def _first_sentence(text: str | None) -> str:
    return (text or "").split(";")[0].split(" (default")[0].replace("%%", "%")
