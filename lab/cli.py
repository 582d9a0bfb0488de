"""The `lab` command."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lab import errors
from lab.console import make_console, make_error_console, print_claims, short
from lab.data import delete, holdings
from lab.errors import EnvironmentBroken, LabError, UserError
from lab.jobs import OWN, JobsClient, run_job, run_own
from lab.lessons import find, lessons, preflight
from lab.lessons.contract import Lesson, LessonResult
from lab.lessons.options import option, own_fields, parameters
from lab.lessons.run import check_all, default_local_root, log_of, run_lesson, visible
from lab.package import pack
from lab.report.results import find_results, read_results
from lab.runtimes import compose, embedded
from lab.runtimes.choice import choose, make_runtime, present
from lab.runtimes.engine import last_line
from lab.runtimes.protocol import Access, Runtime
from lab.settings import LOGS, ROOT, Settings, load_settings, make_env_file, readable_by_others
from lab.storage import check_name, parse_location
from lab.training.defaults import driver_environment

app = typer.Typer(
    name="lab",
    help="An executable textbook on distributed training with Ray Train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoints_app = typer.Typer(help="Runs and checkpoints in a storage location.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")

OWN_LOGS = frozenset({"crash", "doctor", "checkpoints", "images", "compose-up"})
"""Logs beside those of runs."""

console = make_console()
error_console = make_error_console()


def say(line: str) -> None:
    """One line of the lab's own words."""
    console.print(line, markup=False)


def _runtime(settings: Settings) -> Runtime:
    choice = choose(settings)
    say(f"runtime: {choice.name} ({choice.why})")
    return make_runtime(choice.name, settings)


def _say_what_is_up(runtime: Runtime) -> None:
    parts = runtime.status()
    if parts:
        names = ", ".join(part.name for part in parts)
        error_console.print(f"still up: {names}; `make down` ends them.", markup=False)
    else:
        error_console.print("nothing is left running.", markup=False)


@contextmanager
def _cluster(runtime: Runtime, keep: bool) -> Iterator[Access]:
    """A cluster that is up: the one that was, or one that ends with this block unless it shall be kept."""
    found = runtime.access()
    try:
        access = runtime.up(say)
        yield access
    except KeyboardInterrupt:
        if found is None and not keep:
            say("interrupted: stopping what this command started")
            runtime.down(say)
        _say_what_is_up(runtime)
        raise
    except BaseException:
        if found is None and not keep:
            runtime.down(say)
        raise
    if found is None and not keep:
        runtime.down(say)
    else:
        say("the cluster stays up; `make down` ends it.")


def _client(access: Access, settings: Settings) -> JobsClient:
    return JobsClient(access.dashboard, settings.ray_auth_token.get_secret_value())


@app.command("list")
def list_lessons(
    lesson: Annotated[str | None, typer.Argument(help="one lesson, in full")] = None,
    names: Annotated[bool, typer.Option("--names", help="names alone")] = False,
) -> None:
    """The lessons: what each needs and about how long it takes."""
    if lesson:
        _describe(find(lesson))
        return
    for name, item in lessons().items():
        if names:
            say(name)
            continue
        where = "the head" if item.needs.role == "head" else f"{item.needs.nodes}+ worker nodes"
        quick, full = item.seconds
        say(
            f"{name:18s} {item.title} [{where}; {item.params().workers} ranks; about {full} s, quick {quick} s]"
        )


def _describe(item: Lesson) -> None:
    say(f"{item.name}: {item.title}\n\n{item.idea}\n\nclaims:")
    for claim in item.claims:
        say(f"  {claim.id}: {claim.statement}")
    _describe_options(item)
    if item.breaks:
        say("\nwhat --break can break, and the claims that then fail:")
        for broken in item.breaks:
            say(f"  {broken.name:22s} {broken.what} -> {', '.join(broken.fails)}")


def _verdict(result: LessonResult) -> str:
    if not result.holds:
        return "A CLAIM FAILED"
    unshown = sum(claim.verdict == "not shown" for claim in result.claims)
    return f"every claim that could be shown holds, {unshown} could not" if unshown else "all claims hold"


def _short_path(path: str) -> str:
    return str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else path


def _describe_options(item: Lesson) -> None:
    if own := own_fields(item):
        say("\nits own options:")
        for name, field in own.items():
            say(f"  {option(name):22s} {field.metadata.get('help', '')} (default {field.default})")


class _RunCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ever; `--help` answers before the argument is known, so keep the words for it."""
        ctx.meta["words"] = tuple(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The command's help, and below it the own options of the lesson that was named."""
        super().format_help(ctx, formatter)
        known = lessons()
        named = next((known[word] for word in ctx.meta["words"] if word in known), None)
        if named:
            _describe_options(named)


@app.command(cls=_RunCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    lesson: Annotated[str, typer.Argument(help="a lesson's name, several with commas, or `all`")],
    workers: Annotated[str | None, typer.Option(metavar="N", help="ranks (LAB_WORKERS)")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N", help="worker nodes (LAB_NODES)")] = None,
    storage: Annotated[str | None, typer.Option(help="local path or s3:// URI (LAB_STORAGE)")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="seed (LAB_SEED)")] = None,
    name: Annotated[str | None, typer.Option(help="run name; an existing one resumes (LAB_NAME)")] = None,
    fresh: Annotated[
        bool | None, typer.Option("--fresh", help="delete the named run first (LAB_FRESH)")
    ] = None,
    quick: Annotated[bool | None, typer.Option("--quick", help="the short form (LAB_QUICK)")] = None,
    keep: Annotated[bool | None, typer.Option("--keep", help="leave the cluster up (LAB_KEEP)")] = None,
    broken: Annotated[str, typer.Option("--break", help="break a mechanism and see its claim fail")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="show Ray's own lines too")] = False,
) -> None:
    """Run one lesson or several; options of the lesson's own follow its name (`lab list LESSON`)."""
    settings = load_settings(
        workers=workers,
        nodes=nodes,
        storage=storage,
        seed=seed,
        name=name,
        fresh=fresh,
        quick=quick,
        keep=keep,
    )
    chosen = list(lessons().values()) if lesson == "all" else [find(item) for item in lesson.split(",")]
    if len(chosen) > 1 and (context.args or broken):
        raise UserError(
            f"{(context.args or ['--break'])[0]!r} is one lesson's own option: run that lesson alone."
        )
    if len(chosen) > 1 and settings.name:
        raise UserError(f"LAB_NAME={settings.name!r} names one run: run one lesson with it.")
    asked = [(item, parameters(item, settings, context.args, broken)) for item in chosen]
    choice = choose(settings)
    runtime = make_runtime(choice.name, settings)
    for item, params in asked:
        check_all(item, params, settings, runtime.access(), choice.name)
    say(f"runtime: {choice.name} ({choice.why})")
    cores = os.cpu_count() or 1

    def line(text: str) -> None:
        shown = text if verbose else visible(text)
        if shown is not None:
            say(f"  {shown}")

    results: list[dict[str, Any]] = []
    broke: list[str] = []
    with _cluster(runtime, settings.keep) as access:
        for item, params in asked:
            for warning in preflight.warnings(params, cores):
                say(f"warning: {warning}")
            try:
                result = run_lesson(item, params, settings, runtime, access, say, line)
            except EnvironmentBroken as error:
                if len(asked) == 1:
                    raise
                broke.append(f"{item.name}: {error}")
                say(f"{item.name} could not be run: {error}")
                continue
            results.append(asdict(result) | {"holds": result.holds})
            say(f"{item.name}: {_verdict(result)} ({result.seconds:.0f} s)")
            if broken:
                done = next(each for each in item.breaks if each.name == broken)
                say(
                    f"{item.name}: {broken} was broken on purpose ({done.what}); the claims that must then fail: "
                    f"{', '.join(done.fails)}"
                )
    print_claims(console, results)
    for found in results:
        say(f"results: {_short_path(found['files']['results'])}  storage: {found['files']['storage']}")
    for text in broke:
        error_console.print(f"not run: {text}", markup=False)
    if broke:
        raise typer.Exit(errors.ENVIRONMENT_BROKE)
    if not all(found["holds"] for found in results):
        raise typer.Exit(errors.CLAIM_FAILED)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="sent to every node; driver and ranks start in it")
    ],
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="the program and its arguments, or one line of shell"),
    ],
) -> None:
    """Run a program of your own on the cluster that is up, and follow it to its end.

    All of FOLDER travels, 64 MiB at most, but for .git, .venv, .lab, .env and __pycache__. A Ctrl-C stops the program.
    """
    settings = load_settings()
    line = _program(command)
    if not folder.strip():
        raise UserError("FOLDER='' names nothing: name the folder that holds your program.")
    package = pack(Path(folder), settings.secrets())
    access = _runtime(settings).access()
    if access is None:
        raise UserError("no cluster is up to run it on: `make up` starts one.")
    outcome = run_own(
        _client(access, settings),
        line,
        package,
        driver_environment()
        # the ranks start where the driver does, instead of in a folder of Ray Train's own
        | {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_COLOR_PREFIX": str(int(console.is_terminal))},
        logs=LOGS,
        say=say,
        line=say,
    )
    if outcome.status != "SUCCEEDED":
        why = outcome.message.partition(", last available logs")[0]  # they were shown already
        error_console.print(f"job {outcome.id}: {outcome.status}: {last_line(why)}", markup=False)
        raise typer.Exit(errors.CLAIM_FAILED)
    say(f"job {outcome.id}: done ({outcome.seconds:.0f} s)")


def _program(command: list[str]) -> str:
    """The command as one line for the head's shell; a single word may be such a line already."""
    words = command[1:] if command[0] == "--" else command
    line = words[0] if len(words) == 1 else shlex.join(words)
    if not line.strip() or line.startswith("-"):
        raise UserError(f"COMMAND={line!r} is no program: give one, as in `python train.py first-try`.")
    try:
        line.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"COMMAND={line!r} is no UTF-8 text: put what is odd in it into a file of FOLDER."
        ) from None
    return line


@app.command()
def results(
    run_name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="one run, in full")] = None,
) -> None:
    """Past runs: a line each, or one in full."""
    if run_name:
        *others, found = find_results(ROOT, run_name)
        print_claims(console, [found])
        for key, value in found["measurements"].items():
            say(f"{key}: {short(value, 100)}")
        say(f"folder: {found['folder']}  storage: {found['files']['storage']}")
        for other in others:
            say(f"also of that name: {other['lesson']}, {other['folder']}")
        return
    rows = read_results(
        ROOT, lambda path: error_console.print(f"left out: {path} cannot be read.", markup=False)
    )
    if not rows:
        say("no results yet: `make demo`, or `make first-run`.")
    for row in rows:
        verdict = "holds" if row["holds"] else "FAILS"
        say(
            f"{verdict:6s} {row['lesson']:18s} {Path(row['folder']).name}  {row['runtime']}  {row['seconds']:.0f} s "
            f" {row['environment']['date'][:19]}"
        )


@app.command()
def setup() -> None:
    """Make `.env` with this checkout's secrets, unless it is there."""
    path = ROOT / ".env"
    made = make_env_file(path)
    load_settings()
    say(f"{path}: {'made, mode 600' if made else 'is there, left as it is'}")
    if readable_by_others(path):
        say(f"warning: others may read its secrets: chmod 600 {path}")


@app.command("choose")
def choose_runtime() -> None:
    """Print which runtime would be used, and on standard error why."""
    choice = choose(load_settings())
    error_console.print(f"runtime: {choice.name} ({choice.why})", markup=False)
    say(choice.name)


@app.command()
def up(
    nodes: Annotated[str | None, typer.Option(metavar="N", help="worker nodes (LAB_NODES)")] = None,
) -> None:
    """Start the cluster and the store; return when both are proven healthy."""
    settings = load_settings(nodes=nodes)
    runtime = _runtime(settings)
    try:
        access = runtime.up(say)
    except KeyboardInterrupt:
        _say_what_is_up(runtime)
        raise
    say(f"up: a head and {access.nodes} workers of {access.node_cpus} CPUs; dashboard {access.dashboard}")


@app.command()
def down() -> None:
    """End the cluster and the store of this checkout, on whichever runtime they are up. Data stays."""
    up_now = [runtime for runtime in present(load_settings()) if runtime.status()]
    for runtime in up_now:
        runtime.down(say)
        say(f"{runtime.name}: down; the data stays.")
    if not up_now:
        say("nothing is up.")


@app.command()
def status() -> None:
    """What is up, part by part."""
    parts = [(runtime.name, part) for runtime in present(load_settings()) for part in runtime.status()]
    if not parts:
        say("nothing is up: `make up` starts a cluster.")
    for name, part in parts:
        say(f"{name:10s} {part.name:24s} {part.state:10s} {part.detail}")


@app.command()
def doctor() -> None:
    """Look for what is wrong: engine, nodes, versions, store, clock, shared memory."""
    from lab.doctor import examine

    settings = load_settings()
    faults = 0
    for check in examine(settings, _runtime(settings)):
        faults += check.level == "fault"
        say(f"{check.level:8s} {check.name:8s} {check.text}")
    if faults:
        raise typer.Exit(errors.CLAIM_FAILED)


@app.command()
def dashboard(
    token: Annotated[bool, typer.Option("--token", help="how to log in: prints the token")] = False,
) -> None:
    """The URL of Ray's dashboard."""
    settings = load_settings()
    access = _runtime(settings).access()
    if access is None:
        raise UserError("no cluster is up, so it has no dashboard: `make up` starts one.")
    say(access.dashboard)
    if token:
        say("The page asks for a token once; paste this one:")
        say(settings.ray_auth_token.get_secret_value())
    else:
        say("`make dashboard ARGS=--token` says how to log in.")


@app.command()
def logs(
    run_name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="a run; default the newest")] = None,
    rank: Annotated[int | None, typer.Option(help="this rank's lines alone")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Ray's own lines too")] = False,
) -> None:
    """The log of a run, rank by rank."""
    if run_name:
        path = log_of(check_name(run_name, "RUN"))
    else:
        logs_of_runs = [path for path in LOGS.glob("*.log") if path.stem not in OWN_LOGS]
        found = sorted(logs_of_runs, key=lambda item: item.stat().st_mtime)
        if not found:
            raise UserError(f"there is no log below {LOGS} yet: run a lesson first.")
        path = found[-1]
    say(f"log: {path}")
    lines = path.read_text(errors="replace").splitlines()
    own = path.stem.startswith(OWN)  # of a program of the user's, in which every line is theirs
    if rank is not None:
        by_rank = {text: int(match[1]) for text in lines if (match := re.search(r"\[rank (\d+)/", text))}
        ranks = sorted(set(by_rank.values()))
        if rank not in ranks:
            if own:
                raise UserError(
                    f"RANK={rank}: the lines in {path} name the process that wrote them, not its rank: leave RANK away, "
                    "and let the program print its rank."
                )
            there = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank's"
            raise UserError(f"RANK={rank} has no line in {path}: it has {there}.")
        lines = [text for text in lines if by_rank.get(text) == rank]
    for text in lines:
        shown = text if everything or own else visible(text)
        if shown is not None:
            say(shown)


def _storage_job(storage: str | None, request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    settings = load_settings(storage=storage)
    runtime = _runtime(settings)
    access = runtime.access()
    root = access.local_root if access else default_local_root(runtime.name)
    location = parse_location(settings.storage or f"{root}/runs")
    with _cluster(runtime, settings.keep) as up_now:
        document = run_job(
            _client(up_now, settings),
            "checkpoints",
            {"run": "checkpoints", "storage": str(location), "params": request},
            log=LOGS / "checkpoints.log",
            say=lambda line: None,
            limit_s=120,
        )
    return str(location), document


@checkpoints_app.command("list")
def checkpoints_list(
    storage: Annotated[str | None, typer.Option(help="local path or s3:// URI (LAB_STORAGE)")] = None,
) -> None:
    """The runs in a storage location, with their checkpoints."""
    location, document = _storage_job(storage, {"action": "list"})
    if not document["runs"]:
        say(f"no run in {location}.")
    for name, found in document["runs"].items():
        say(
            f"{name}: {len(found['checkpoints'])} checkpoints, {found['files']} files, {found['bytes']:,} bytes"
        )
        for folder in found["checkpoints"]:
            say(f"  {folder}")


@checkpoints_app.command("clean")
def checkpoints_clean(
    names: Annotated[list[str] | None, typer.Argument(help="the runs to look at, by name")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every run there")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="the named runs themselves, not their leftovers")
    ] = False,
    storage: Annotated[str | None, typer.Option(help="local path or s3:// URI (LAB_STORAGE)")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="really delete")] = False,
) -> None:
    """Show what nothing refers to in these runs: checkpoint folders of killed attempts that the snapshot does not
    name, unfinished uploads. With --yes delete exactly that; with --whole the runs themselves. Never in a live run."""
    asked = _asked(names or [], everything, whole)
    request = {"action": "whole" if whole else "leftovers", "names": asked, "delete": yes}
    location, document = _storage_job(storage, request)
    for name in asked:
        if name not in document["runs"]:
            raise UserError(
                f"NAME={name!r} is not a run in {location}: see `.venv/bin/lab checkpoints list`."
            )
    held = []
    for found in document["cleaned"]:
        name = found["name"]
        if "unclear" in found:
            say(f"left alone: {found['unclear']}")
            continue
        if found["held"] and (yes or whole):
            held.append(f"{location}/{name} was left alone: {found['held']}; wait for its end, or stop it.")
            continue
        verb = "deleted" if found["deleted"] else "would delete"
        if whole:
            if not found["is_run"]:
                raise UserError(
                    f"NAME={name!r}: {location}/{name} is no run of Ray Train, so it is left alone: delete it yourself."
                )
            run = document["runs"][name]
            say(f"{verb} {location}/{name}: {run['files']} files, {run['bytes']:,} bytes")
            continue
        _say_leftovers(f"{location}/{name}", found, verb)
    if not document["cleaned"]:
        say(f"no run in {location}.")
    if not yes:
        say("nothing was deleted: add --yes.")
    for line in held:
        if asked:
            raise UserError(line)
        say(line)


def _asked(names: list[str], everything: bool, whole: bool) -> list[str]:
    for name in names:
        check_name(name, "NAME")
    if everything and names:
        raise UserError(f"--all and NAME={names[0]!r} were both given: use one of them.")
    if everything and whole:
        raise UserError("--whole deletes runs, and takes them by name alone: name them instead of --all.")
    if not everything and not names:
        raise UserError(
            "NAME is missing: name runs (`.venv/bin/lab checkpoints list` shows them), or use --all."
        )
    return names


def _say_leftovers(where: str, found: dict[str, Any], verb: str) -> None:
    if not found["is_run"]:
        say(f"{where}: no run of Ray Train, nothing to clean")
        return
    alive = f" (not now: {found['held']})" if found["held"] else ""
    for folder in found["folders"]:
        say(f"{verb} {where}/{folder['name']}: {folder['files']} files, {folder['bytes']:,} bytes{alive}")
    for key in found["uploads"]:
        say(f"{verb} the unfinished upload of {key}{alive}")
    if not found["folders"] and not found["uploads"]:
        say(f"{where}: nothing is left over")


@app.command("clean-data")
def clean_data(yes: Annotated[bool, typer.Option("--yes", help="really delete")] = False) -> None:
    """Show what results, storage, logs and volumes there are; with --yes delete them."""
    settings = load_settings()
    for runtime in present(settings):
        if runtime.status():
            raise UserError(f"the {runtime.name} cluster is up and uses its data: `make down` first.")
    found = holdings(ROOT, settings.project)
    if not found:
        say("there is no data.")
    for holding in found:
        size = "" if holding.bytes is None else f", {holding.bytes / 1e6:,.1f} MB"
        verb = "leaving alone" if holding.kind == "link" else "deleting" if yes else "would delete"
        say(f"{verb} {holding.kind} {holding.name}{size}")
        if yes:
            delete(holding)
    if found and not yes:
        say("nothing was deleted: add --yes (make clean-data YES=1).")


images_app = typer.Typer(help="The lab's container images.", no_args_is_help=True)
app.add_typer(images_app, name="images")


@images_app.command("build")
def images_build() -> None:
    """Build the lab's images."""
    _compose().build(say)


@images_app.command("pull")
def images_pull() -> None:
    """Fetch and build all that a demo will need, for tomorrow without a network."""
    settings = load_settings()
    choice = choose(settings)
    if choice.name == "embedded":
        embedded.require_host()
        say(f"runtime: embedded ({choice.why}): .venv has all that it needs.")
        return
    _compose().build(say)


def _compose() -> compose.ComposeRuntime:
    problem = compose.engine_problem()
    if problem:
        raise UserError(f"no images can be had here: {problem}")
    return compose.ComposeRuntime(load_settings())


@app.command()
def diagnose() -> None:
    """The last relevant lines of every part's log."""
    say(_runtime(load_settings()).diagnose())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every error is one sentence and an exit code."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, for any of them
        code = app(args=arguments, standalone_mode=False)
        if code == errors.INTERRUPTED:  # typer's own answer to a Ctrl-C, without a word
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else errors.OK)
    except LabError as error:
        error_console.print(str(error), markup=False)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        error_console.print("interrupted.", markup=False)
        sys.exit(errors.INTERRUPTED)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:  # noqa: BLE001 - the boundary: click's own mistakes, then the lab's defects
        shown = getattr(error, "format_message", None)
        if shown is not None:
            error_console.print(f"{shown()} See `.venv/bin/lab --help`.", markup=False)
            sys.exit(errors.USER_MISTAKE)
        if isinstance(error, OSError) and error.filename is not None:
            error_console.print(f"{error.filename}: {error.strerror}: see who may use it.", markup=False)
            sys.exit(errors.ENVIRONMENT_BROKE)
        log = LOGS / "crash.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(traceback.format_exc())
        except OSError:
            traceback.print_exc()
        error_console.print(
            f"a defect of the lab: {type(error).__name__}: {error}. The traceback is in {log}.", markup=False
        )
        sys.exit(errors.ENVIRONMENT_BROKE)


if __name__ == "__main__":
    main()
