"""The arguments of each command: one function for each, named after it.

A docstring is the command's help: its summary, and its examples, lines that begin with "autopar".
Nothing here loads torch, so that `--help` and completion answer at once; what a command does stands
in the module that `COMMANDS` names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from autopar.candidates.patience import SECONDS
from autopar.defaults import MODES, QUESTIONS, VERIFIED_RANKS
from autopar.pipeline import NAMES as SCHEDULES
from autopar.pipeline.notation import read_option
from autopar.pipeline.schedules import option_names
from autopar.pipeline.simulation.synchronization import MODES as SYNC_MODES
from autopar.plans.changes import CHANGES
from autopar.states import NAMED

SPEC = "file.py:function or package.module:function"
SHELLS = ("bash", "zsh", "fish")
# Options of schedules that are also costs of the simulation: a plan is made for the same times.
COSTS = ("forward", "backward", "backward_weight", "latency")
NARROWEST = 60  # columns of a drawing
_PLAN_FILE = "A file that `autopar plan --out` wrote"


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which refuses wrong arguments with the command's own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse arguments, and refuse those that are unknown."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and getattr(parsed, "model", "") is None and not rest[0].startswith("-"):
            # Seen in Python 3.11: an optional positional is left over where an option stands first.
            parsed.model = rest.pop(0)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if getattr(parsed, "needs_model", False) and parsed.model is None:
            self.error("a model is needed: SPEC, or --model SPEC")
        return parsed, rest


def demo(parser: argparse.ArgumentParser) -> None:
    """Train a small GPT on 4 local processes and compare with one.

    autopar demo
    autopar demo --steps 50
    """
    _add_count(parser, "--steps", 20, "The number of training steps.")
    _add_json(parser, "the losses")


def plan(parser: argparse.ArgumentParser) -> None:
    """Find where every tensor of a model lives, without running it.

    autopar plan autopar.examples:gpt --cluster dgx-h100 --nodes 2 --out plan.json
    """
    _add_model(parser)
    add_plan(parser)
    parser.add_argument("--out", metavar="FILE", help="Save the plan to this file. Default: none.")
    _add_json(parser, "the plan's figures")


def explain(parser: argparse.ArgumentParser) -> None:
    """Tell why a plan is as it is, and what it would take elsewhere.

    autopar explain plan.json layers.0.up --model autopar.examples:gpt
    autopar explain autopar.examples:gpt stages --cluster dgx-h100 --nodes 2
    autopar explain plan.json --model train.py:gpt --what-if nodes=4,batch=2x
    """
    add = parser.add_argument
    add("plan", metavar="PLAN|MODEL", help=f"{_PLAN_FILE}, or a model to plan, as {SPEC}.")
    questions = ", ".join(QUESTIONS)
    name = f"The name of a parameter, module or node; or for the whole step {questions}."
    add("name", metavar="NAME", nargs="?", help=name)
    _add_model(parser, required=False)
    elsewhere = (
        "Tell what the same decisions would take elsewhere, as nodes=4,bandwidth=2x. Each of "
        f"{', '.join(CHANGES)} takes a new value or a factor. Default: none."
    )
    add("--what-if", metavar="CHANGES", help=elsewhere)
    add("--search", action="store_true", help="With --what-if, also plan anew there.")
    add_plan(parser)
    _add_json(parser, "the whole answer")


def diff(parser: argparse.ArgumentParser) -> None:
    """Show two saved plans side by side.

    autopar diff one.json two.json --model autopar.examples:gpt
    """
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), help=f"{_PLAN_FILE}.")
    _add_model(parser, required=False)
    _add_json(parser, "the differences")


def report(parser: argparse.ArgumentParser) -> None:
    """Write a plan as a page for a browser, one file.

    autopar report autopar.examples:gpt --cluster dgx-h100 --out plan.html
    autopar report plan.json --model autopar.examples:gpt
    """
    add = parser.add_argument
    add("what", metavar="PLAN|MODEL", help=f"{_PLAN_FILE}, or a model to plan, as {SPEC}.")
    add("--model", metavar="SPEC", help="The model of a plan from a file.")
    add_plan(parser)
    page = "Write this file. Default: plan.html."
    add("--out", metavar="FILE", default="plan.html", help=page)
    _add_json(parser, "the plan's figures")


def compare(parser: argparse.ArgumentParser) -> None:
    """Tell which predictions a measured trace shows to be off.

    autopar compare simulated.json.gz measured.json.gz
    """
    simulated, measured = "plan.trace(path)", "pm.record().save(path)"
    parser.add_argument("simulated", metavar="SIMULATED", help=f"The file that {simulated} wrote.")
    parser.add_argument("measured", metavar="MEASURED", help=f"The file that {measured} wrote.")
    _add_json(parser, "the figures")


def verify(parser: argparse.ArgumentParser) -> None:
    """Train a model plain, captured and in parallel, and compare.

    autopar verify autopar.examples:gpt --mesh dp=2,tp=2
    autopar verify train.py:gpt --mesh pp=2,dp=2 --schedule 1f1b --microbatches 4
    """
    _add_model(parser)
    _add_decisions(parser, f"a mesh of {VERIFIED_RANKS} ranks is chosen")
    _add_count(parser, "--steps", 3, "The number of optimizer steps.")
    _add_json(parser, "every comparison")


def simulate(parser: argparse.ArgumentParser) -> None:
    """Price and draw a schedule without any device.

    autopar simulate chimera --stages 8 --microbatches 8 --backward 2
    autopar simulate my-schedule.csv --latency 0.25 --json
    """
    add = parser.add_argument
    add("schedule", help=f"One of {', '.join(SCHEDULES)}, or a schedule file (.txt or .csv).")
    add("--stages", metavar="N", type=int, help="The number of ranks of the pipeline.")
    microbatches = "The number of micro-batches in a step, over all pipes."
    add("--microbatches", metavar="N", type=int, help=microbatches)
    for option in schedule_options():
        takers = ", ".join(name for name in SCHEDULES if option in option_names(name))
        add(f"--{option}", type=read_option, help=f"The option {option} of {takers}.")
    forward = "The time of a forward, or of each stage's, as 1,1,2. Default: 1."
    add("--forward", metavar="T", type=_times, default=1.0, help=forward)
    backward = "The time of a whole backward. Default: 2."
    add("--backward", metavar="T", type=_times, default=2.0, help=backward)
    weight = "The time of the part of backward that can be put off. Default: half of it."
    add("--backward-weight", metavar="T", type=_times, help=weight)
    latency = "The time of a message between two ranks. Default: 0."
    add("--latency", metavar="T", type=float, default=0.0, help=latency)
    sync = (
        "When ranks start to sum a stage's gradient. Default: as the schedule lists it, or eager."
    )
    add("--sync", choices=SYNC_MODES, help=sync)
    sync_cost = "The time of a stage's all-reduce. Default: 0."
    add("--sync-cost", metavar="T", type=_times, default=0.0, help=sync_cost)
    width = f"The columns of the drawing. Default: the terminal's, and at least {NARROWEST}."
    add("--width", metavar="N", type=int, help=width)
    _add_json(parser, "the figures")


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Measure this machine, and how far predictions of plans are off.

    autopar calibrate
    autopar calibrate --ranks 4 --out machine.toml
    torchrun --nproc-per-node 8 -m autopar.cli calibrate --out machine.toml
    """
    ranks = "The number of processes of this machine. Default: 2."
    parser.add_argument("--ranks", metavar="N", type=int, help=ranks)
    file = "Write a cluster file, for --cluster. Default: none."
    parser.add_argument("--out", metavar="FILE", help=file)
    _add_json(parser, "the figures")


def doctor(parser: argparse.ArgumentParser) -> None:
    """See whether this machine can run parallel programs.

    autopar doctor
    autopar doctor --ranks 8 --json
    """
    _add_count(parser, "--ranks", 2, "The number of processes to start.")
    _add_json(parser, "the checks")


def completion(parser: argparse.ArgumentParser) -> None:
    """Print what makes a shell complete autopar's commands.

    autopar completion bash >> ~/.bashrc
    autopar completion zsh >> ~/.zshrc
    autopar completion fish > ~/.config/fish/completions/autopar.fish
    """
    parser.add_argument("shell", choices=SHELLS, help="The shell whose completion is printed.")


PARSERS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    function.__name__: function
    for function in (
        *(demo, plan, explain, diff, report, compare),
        *(verify, simulate, calibrate, doctor, completion),
    )
}


def make_parser(description: str, version: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="autopar", description=description)
    parser.add_argument("--version", action="version", version=f"autopar {version}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, add_arguments in PARSERS.items():
        text = summary(name).replace("%", "%%")
        shown = "\n  ".join(("examples:", *examples(name)))
        form = argparse.RawDescriptionHelpFormatter
        command_parser = commands.add_parser(
            name, help=text, description=text, epilog=shown, formatter_class=form
        )
        add_arguments(command_parser)
    return parser


def summary(name: str) -> str:
    """Return a command's summary, from the first line of its function."""
    return (PARSERS[name].__doc__ or "").partition("\n")[0].rstrip(".")


def examples(name: str) -> list[str]:
    """Return examples of calls of a command, from its function's docstring."""
    lines = [line.strip() for line in (PARSERS[name].__doc__ or "").splitlines()]
    return [line for line in lines if line.startswith(f"autopar {name}")]


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is planned."""
    add = parser.add_argument
    machines = "The machines: a preset or a TOML file. Default: dgx-h100."
    cluster = add("--cluster", metavar="NAME", default="dgx-h100", help=machines)
    _complete_with(cluster, _presets)
    add("--nodes", metavar="N", type=int, help="The number of nodes of a preset. Default: 1.")
    _add_decisions(parser, "every mesh is weighed")
    memory = "The memory of each device that may be used, as 40GB. Default: all but the reserve."
    add("--memory", metavar="SIZE", help=memory)
    reserve = (
        "The memory of each device that is left for what is no tensor, as 8GB. Default: that of "
        "the kind of device."
    )
    add("--reserve", metavar="SIZE", help=reserve)
    most = f"The CPU seconds that a choice may take; inf for no limit. Default: {SECONDS:g}."
    add("--seconds", metavar="S", type=float, default=SECONDS, help=most)


def schedule_options() -> list[str]:
    """Return the options of schedules that are no costs."""
    every = {option for name in SCHEDULES for option in option_names(name)}
    return sorted(every - {*COSTS, "sync"})


def _add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the model: SPEC, the last of the positionals, or `--model SPEC`."""
    group = parser.add_mutually_exclusive_group()
    text = f"The function that returns (model, args, kwargs), as {SPEC}."
    group.add_argument("model", metavar="SPEC", nargs="?", default=argparse.SUPPRESS, help=text)
    group.add_argument("--model", metavar="SPEC", help="The same as SPEC, as an option.")
    parser.set_defaults(needs_model=required)


def _add_decisions(parser: argparse.ArgumentParser, no_mesh: str) -> None:
    """Add the decisions of `plan`; `no_mesh` says what happens without a mesh."""
    add = parser.add_argument
    add("--mesh", metavar="AXES", help=f"The axes over ranks, as dp=2,tp=4. Default: {no_mesh}.")
    mode = "Decide layouts by search, by annotations, or by cutting the batch. Default: auto."
    add("--mode", choices=MODES, default="auto", help=mode)
    parts = "The number of micro-batches in a step. Default: auto."
    add("--microbatches", metavar="N", default="auto", help=parts)
    pipeline = "The number of stages, the name of the pipeline's axis, or none. Default: auto."
    add("--pipeline", metavar="N", default="auto", help=pipeline)
    named = "The name of a schedule, or a .csv or .txt file. Default: auto."
    schedule = add("--schedule", metavar="NAME", default="auto", help=named)
    _complete_with(schedule, lambda: SCHEDULES)
    states = "How ZeRO cuts parameters, gradients and optimizer states. Default: auto."
    add("--states", choices=("auto", *NAMED), default="auto", help=states)
    again = ("auto", "selective", "full", "none")
    text = "What runs its forward again in backward. Default: auto."
    add("--recompute", choices=again, default="auto", help=text)


def _add_count(parser: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    text = f"{text} Default: {default}."
    parser.add_argument(option, metavar="N", type=int, default=default, help=text)


def _add_json(parser: argparse.ArgumentParser, figures: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"Print {figures} as JSON.")


def _complete_with(option: argparse.Action, words: Callable[[], Sequence[str]]) -> None:
    """Set what gives the words that a shell offers after an option which takes others too."""
    vars(option)["words"] = words


def _presets() -> Sequence[str]:
    from autopar.cluster.presets import NAMES  # loads torch

    return NAMES


def _times(text: str) -> float | tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values
