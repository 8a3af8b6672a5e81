"""The command `autopar completion`: print what makes a shell complete autopar's commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from autopar.commands.parsers import make_parser
from autopar.commands.streams import to_results

# name of a command -> its options, each with the words that may follow it
Options = Mapping[str, Mapping[str, Sequence[str]]]


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    to_results(SHELLS[arguments.shell](options()))
    return 0


def options() -> Options:
    """Return the options of all commands, as the command line reads them."""
    (commands,) = (
        action
        for action in make_parser("", "")._actions  # argparse tells of its actions nowhere else
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {
            word: tuple(map(str, action.choices or vars(action).get("words", tuple)()))
            for action in parser._actions
            for word in action.option_strings or (("",) if action.choices else ())
            if word != "-h"
        }
        for name, parser in commands.choices.items()
    }


def bash(known: Options) -> str:
    """Return the completion for bash, which zsh can read too."""
    cases = [
        f"      '{name} {option}') words='{' '.join(words)}';;"
        for name, taken in known.items()
        for option, words in taken.items()
        if words and option
    ]
    cases += [
        f"      '{name} '*) words='{' '.join((*(w for w in taken if w), *taken.get('', ())))}';;"
        for name, taken in known.items()
    ]
    lines = [
        "_autopar() {",
        "  local words before=${COMP_WORDS[COMP_CWORD-1]} word=${COMP_WORDS[COMP_CWORD]}",
        '  if [ "$COMP_CWORD" = 1 ]; then',
        f"    words='{' '.join(known)}'",
        "  else",
        '    case "${COMP_WORDS[1]} $before" in',
        *cases,
        "    esac",
        "  fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _autopar autopar",
    ]
    return "\n".join(lines)


def zsh(known: Options) -> str:
    """Return the completion for zsh."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash(known)}"


def fish(known: Options) -> str:
    """Return the completion for fish."""
    lines = [f"complete -c autopar -n __fish_use_subcommand -f -a {name}" for name in known]
    for name, taken in known.items():
        of = f"complete -c autopar -n '__fish_seen_subcommand_from {name}'"
        for option, words in taken.items():
            flag = f" -l {option.lstrip('-')}" if option else ""
            lines.append(of + flag + (f" -x -a '{' '.join(words)}'" if words else ""))
    return "\n".join(lines)


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
