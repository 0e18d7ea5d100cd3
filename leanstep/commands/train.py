"""`leanstep train gpt|lens|grpo`: one recipe from start to end, or several seeds of it against a target."""

from __future__ import annotations

import importlib
import json
import math
import re
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from leanstep.commands import BadInput, FellShort
from leanstep.commands.ablations import compare_variants
from leanstep.commands.terminal import check_writable, write_json

RECIPES = ("gpt", "lens", "grpo")
# A checkpoint's name has eight digits.
MOST_STEPS = 99_999_999


def train(
    recipe: Annotated[str, typer.Argument(help="gpt, lens or grpo.")],
    preset: Annotated[str, typer.Option(help="Size of the run; see docs/train.md.")] = "tiny",
    steps: Annotated[int | None, typer.Option(help="Length; the schedule is stretched to it.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Directory of the run (default: leanstep-run/RECIPE-PRESET).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights, data order and sampling.")] = 0,
    optimizer: Annotated[str | None, typer.Option(help="gpt: normuon or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: the preset's.")] = None,
    runs: Annotated[int | None, typer.Option(help="Record: that many seeds, needs --target.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Validation loss to reach; without --runs the run stops there.")
    ] = None,
    record: Annotated[
        str | None, typer.Option(help="Where the record goes (default: OUT/record.json).")
    ] = None,
    against: Annotated[str | None, typer.Option(help="An earlier record to compare with.")] = None,
    set_options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other option of the recipe; gpt: model.FIELD=VALUE too."
        ),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(metavar="FIELD=VALUE,...", help="gpt: does each of these change the loss?"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Paired runs of every ablation.")] = 5,
    log_every: Annotated[int | None, typer.Option(help="Steps between metric lines.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Save and stop at this step of the schedule.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="With --ablate: write into this report page.")
    ] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Result as JSON; - for standard output.")
    ] = None,
) -> int:
    """Train one of the three recipes end to end: checkpoints, exact resuming, metrics, records.

    Several processes: torchrun --nproc-per-node 2 -m leanstep train gpt ...

    Example: leanstep train gpt --preset tiny --out runs/gpt
    Example: leanstep train gpt --ablate inject=before,smear=false --seeds 5
    """
    from leanstep.recipes import process_group
    from leanstep.recipes.distributed import check_device
    from leanstep.recipes.training_loop import Diverged

    module = _recipe_module(recipe)
    if preset not in module.PRESETS:
        raise BadInput(f"--preset: {recipe} has no {preset!r}; it has {', '.join(module.PRESETS)}")
    _check_numbers(1, MOST_STEPS, steps=steps, runs=runs, keep=keep, stop_after=stop_after)
    _check_numbers(2, 1000, seeds=seeds)
    _check_numbers(0, MOST_STEPS, log_every=log_every, eval_every=eval_every, save_every=save_every)
    _check_numbers(0, 2**32 - 1 - (runs or 0), seed=seed)
    for name, path in (("out", out), ("record", record), ("against", against)):
        # An empty path would be the current folder.
        if path == "":
            raise BadInput(f"--{name}: expected a path, got ''")
    if runs is not None and target is None:
        raise BadInput("--target: expected a validation loss together with --runs, got none")
    if runs is None and (record is not None or against is not None):
        raise BadInput("--runs: expected a number of seeds together with --record or --against, got none")
    if target is not None and not math.isfinite(target):
        raise BadInput(f"--target: expected a finite loss, got {target}")
    check_writable(json_path, "--json")
    check_writable(html, "--html")
    try:
        check_device(device)
    except ValueError as error:
        raise BadInput(f"--{error}") from error
    options = _options(module, recipe, {"optimizer": optimizer, "lr": lr}, set_options or [])
    variants = _variants(module, recipe, ablate)
    if html is not None and not variants:
        raise BadInput("--html: expected --ablate beside it")
    if variants and (runs is not None or target is not None):
        raise BadInput(
            "--ablate: expected no --runs and no --target beside it; --seeds is its number of runs"
        )
    plan = _Plan(
        module=module,
        recipe=recipe,
        preset=preset,
        steps=steps,
        out=Path(out) if out else Path("leanstep-run") / f"{recipe}-{preset}",
        resume=resume,
        options=options,
        cadence={"log": log_every, "evaluate": eval_every, "save": save_every},
        keep=keep,
        stop_after=stop_after,
    )
    try:
        with process_group(device) as world:
            if variants:
                return compare_variants(plan, variants, range(seed, seed + seeds), world, json_path, html)
            if runs is None:
                return _train_once(plan, seed, target, world, json_path)
            assert target is not None
            return _make_record(plan, seed, runs, target, world, record, against, json_path)
    except Diverged as error:
        raise FellShort(str(error)) from error
    except OSError as error:
        raise BadInput(f"--out: cannot work in {plan.out}: {error}") from error


@dataclass(frozen=True)
class _Plan:
    """What one run of the command line needs, whichever seed."""

    module: Any
    recipe: str
    preset: str
    steps: int | None
    out: Path
    resume: bool
    options: dict[str, Any]
    cadence: dict[str, int | None]
    keep: int
    stop_after: int | None

    def run(self, seed: int, out: Path, world: Any, **how: Any) -> tuple[Any, Any]:
        from rich.console import Console

        from leanstep.commands.terminal import progress_bar, say_above
        from leanstep.recipes import run
        from leanstep.recipes.checkpoint import CheckpointError

        console = Console(stderr=True)
        try:
            built = self.module.build(self.preset, seed=seed, steps=self.steps, world=world, **self.options)
            cadence = replace(built.cadence, **{k: v for k, v in self.cadence.items() if v is not None})
        except (ValueError, MemoryError) as error:
            raise BadInput(f"{self.recipe}: {_one_line(error)}") from error
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise BadInput(f"{self.recipe}: too large for this machine: {_one_line(error)}") from error
        try:
            with progress_bar(console, self.recipe) if world.is_main else nullcontext() as report:
                outcome = run(
                    built, out, resume=self.resume, cadence=cadence, keep=self.keep,
                    stop_after=self.stop_after, world=world, report=report,
                    say=lambda line: say_above(console, line), **how,
                )  # fmt: skip
        except CheckpointError as error:
            raise BadInput(str(error).replace("pass resume", "pass --resume")) from error
        except ValueError as error:
            # The shards: cut short, too small for a batch, tokens outside the vocabulary.
            raise BadInput(f"{self.recipe}: {_one_line(error)}") from error
        return built, outcome


def _train_once(plan: _Plan, seed: int, target: float | None, world: Any, json_path: str | None) -> int:
    built, outcome = plan.run(seed, plan.out, world, target_loss=target)
    if world.is_main:
        result = {
            "recipe": plan.recipe,
            "preset": plan.preset,
            "seed": seed,
            "settings": built.settings,
            "stopped_by": outcome.stopped_by,
            "step": outcome.step,
            "train_time_s": outcome.train_time_s,
            "checkpoint": str(outcome.checkpoint),
            "evaluations": outcome.evaluations,
            **_machine(world),
        }
        write_json(result, json_path)
        if json_path != "-":
            print(f"{outcome.stopped_by} at step {outcome.step}/{built.num_steps}: {plan.out}")
    if outcome.stopped_by == "SIGINT":
        return 130
    if outcome.stopped_by == "end" and target is not None:
        loss = outcome.last_evaluation.get("val_loss")
        raise FellShort(f"target: {target} not reached, the last validation loss is {loss}")
    return 0


def _make_record(
    plan: _Plan, seed: int, runs: int, target: float, world: Any, record: str | None, against: str | None,
    json_path: str | None,
) -> int:  # fmt: skip
    from leanstep.recipes.records import Record, Run, compare
    from leanstep.recipes.training_loop import Diverged

    try:
        old = Record.read(Path(against)) if against is not None else None
    except ValueError as error:
        raise BadInput(f"--against: {error}") from error
    path = Path(record) if record else plan.out / "record.json"
    check_writable(record, "--record")
    finished, settings = [], {}
    for number in range(seed, seed + runs):
        try:
            built, outcome = plan.run(number, plan.out / f"seed-{number}", world)
        except Diverged as error:
            raise FellShort(f"record: seed {number} diverged: {error}") from error
        settings = {key: value for key, value in built.settings.items() if key != "seed"}
        if outcome.stopped_by in ("SIGTERM", "SIGINT"):
            return 0 if outcome.stopped_by == "SIGTERM" else 130
        if world.is_main:
            finished.append(Run.from_evaluations(number, outcome.evaluations, target))
    if not world.is_main:
        return 0
    new = Record(plan.recipe, settings, target, tuple(finished), _machine(world))
    new.write(path)
    result = {
        "record": str(path),
        **json.loads(path.read_text()),
        "comparison": compare(new, old) if old else None,
    }
    write_json(result, json_path)
    if json_path != "-":
        _print_record(new, old)
        print(f"record: {path}")
    if not new.test().significant:
        raise FellShort(f"record: the mean loss is not below {target} with p < 0.01: {_describe_test(new)}")
    return 0


def _describe_test(record: Any) -> str:
    test = record.test()
    p = "no p with one run" if test.p is None else f"p = {test.p:.3g}"
    return f"mean {test.mean:.4f}, {p}, {len(record.times_s)} of {test.n} runs met it"


def _print_record(new: Any, old: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from leanstep.recipes.records import compare

    table = Table(title=f"{new.recipe}: target {new.target}")
    for column in ("", "runs", "steps to target", "time to target s", "final loss", "p"):
        table.add_column(column, justify="left" if column == "" else "right")
    for label, record in (("new", new), ("old", old)):
        if record is not None:
            s = record.summary()
            table.add_row(
                label,
                f"{s['reached']}/{s['n']}",
                _plus_minus(s["steps_to_target"], ".0f"),
                _plus_minus(s["time_to_target_s"], ".2f"),
                _plus_minus(s["loss"], ".4f"),
                "–" if s["p"] is None else f"{s['p']:.3g}",
            )
    console = Console(highlight=False)
    console.print(table)
    if old is not None:
        difference = compare(new, old)
        if difference["time_delta_s"] is not None:
            p = "" if difference["time_p"] is None else f", one-sided p = {difference['time_p']:.3g}"
            console.print(
                f"time {difference['time_delta_s']:+.2f} s (old / new = {difference['time_ratio']:.2f}){p}; "
                f"loss {difference['loss_delta']:+.4f}"
            )
        for warning in difference["warnings"]:
            console.print(f"note: {warning}")


def _plus_minus(spread: dict[str, float | None], form: str) -> str:
    if spread["mean"] is None:
        return "–"
    return format(spread["mean"], form) + ("" if spread["sd"] is None else f" ± {spread['sd']:{form}}")


def _machine(world: Any) -> dict[str, Any]:
    from leanstep.measure.timing import environment

    return {**environment(world.device), "ranks": world.size}


def _recipe_module(recipe: str) -> Any:
    if recipe not in RECIPES:
        raise BadInput(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")
    return importlib.import_module(f"leanstep.recipes.{recipe}")


def _options(module: Any, recipe: str, named: dict[str, Any], pairs: list[str]) -> dict[str, Any]:
    """Options for `build`: names and types as in the recipe's table of settings, which checks the ranges."""
    from leanstep.recipes.settings import parse_setting

    known = [entry.name for entry in fields(module.SETTINGS)]
    options = {key: value for key, value in named.items() if value is not None}
    recipe_options, model = {}, {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key.removeprefix("model.").isidentifier():
            raise BadInput(f"--set: expected KEY=VALUE, got {pair!r}")
        if key.startswith("model."):
            model |= _model_field(module, recipe, key.removeprefix("model."), text)
        else:
            recipe_options[key] = text
    for key in (*options, *recipe_options):
        if key not in known:
            raise BadInput(f"{recipe}: no option {key!r}; it has {', '.join(known) or 'none'}")
    try:
        options |= {key: parse_setting(module.SETTINGS, key, text) for key, text in recipe_options.items()}
    except ValueError as error:
        raise BadInput(f"{recipe}: {error}") from error
    return {**options, "model": model} if model else options


def _model_field(module: Any, recipe: str, name: str, text: str) -> dict[str, Any]:
    """One field of the recipe's model and its value."""
    from leanstep.recipes.settings import parse_field

    if not hasattr(module, "MODEL"):
        raise BadInput(f"{recipe}: its model has no fields to set; gpt's has")
    known = [entry.name for entry in fields(module.MODEL)]
    if name not in known:
        raise BadInput(f"{recipe}: the model has no field {name!r}; it has {', '.join(known)}")
    try:
        return {name: parse_field(module.MODEL, name, text)}
    except ValueError as error:
        raise BadInput(f"{recipe}: model.{error}") from error


def _variants(module: Any, recipe: str, ablate: str | None) -> dict[str, dict[str, Any]]:
    """The model's fields of every ablation, by its text: `inject=before,smear=false` are two."""
    variants = {}
    # A comma inside a value (a tuple) is followed by no name.
    for pair in re.split(r",(?=\s*[A-Za-z_]\w*\s*=)", ablate) if ablate is not None else ():
        name, separator, text = (part.strip() for part in pair.partition("="))
        if not separator or not text:
            raise BadInput(f"--ablate: expected FIELD=VALUE, got {pair!r}")
        variants[f"{name}={text}"] = _model_field(module, recipe, name, text)
    return variants


def _check_numbers(least: int, most: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
        if value is not None and value > most:
            raise BadInput(f"--{name.replace('_', '-')}: expected at most {most}, got {value}")


def _one_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
