"""The contract of a lesson: what it needs, what it claims, how each claim is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Document = Mapping[str, Any]
"""What a lesson's jobs saw: plain JSON. Claims are judged from it alone."""

Verdict = Literal["holds", "fails", "not shown"]


@dataclass(frozen=True)
class Finding:
    """What one claim's judge found in a document. `holds` is None for "not shown here"."""

    expected: Any
    measured: Any
    holds: bool | None
    reason: str = ""


def not_shown(reason: str) -> Finding:
    """The claim cannot be shown in these circumstances (the claim must declare that it may be)."""
    return Finding(expected=None, measured=None, holds=None, reason=reason)


@dataclass(frozen=True)
class Claim:
    """One statement of a lesson, and how the lab judges it.

    `may_be_unshown` declares when "not shown" is an honest answer; without it, not shown is a failure.
    """

    id: str
    statement: str
    judge: Callable[[Document], Finding]
    may_be_unshown: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, as it stands in a result."""

    id: str
    statement: str
    expected: Any
    measured: Any
    verdict: Verdict
    reason: str = ""


def judge(claim: Claim, document: Document) -> Judged:
    """Judge one claim. A document without what the claim needs makes it fail, never pass."""
    try:
        finding = claim.judge(document)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        finding = Finding("an observation to judge", f"{type(error).__name__}: {error}", False)
    if finding.holds is None and not claim.may_be_unshown:
        finding = Finding(finding.expected, "not shown", False, finding.reason)
    verdict: Verdict = "not shown" if finding.holds is None else "holds" if finding.holds else "fails"
    return Judged(claim.id, claim.statement, finding.expected, finding.measured, verdict, finding.reason)


@dataclass(frozen=True)
class Break:
    """A live twin: a mechanism that `--break NAME` breaks, and the claims that must then fail."""

    name: str
    what: str
    fails: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """The nodes that a lesson's ranks run on: the head alone, or at least `nodes` workers.

    `spare_cpus` are logical CPUs of theirs that no rank may take: Ray Data's pipeline runs there (pitfall D7).
    """

    role: Literal["head", "worker"]
    nodes: int = 1
    spare_cpus: int = 0


@dataclass(frozen=True)
class Params:
    """What every lesson can be told. A lesson with more knobs subclasses this.

    A field's `metadata["help"]` is its text in `lab run LESSON --help`.
    """

    workers: int = field(default=2, metadata={"help": "ranks (worker processes)"})
    seed: int = field(default=0, metadata={"help": "seed of model, data order and augmentation"})
    storage: str = field(default="", metadata={"help": "local path or s3:// URI; default: the lesson's own"})
    name: str = field(default="", metadata={"help": "run name; an existing one resumes"})
    fresh: bool = field(default=False, metadata={"help": "delete the named run first"})
    quick: bool = field(default=False, metadata={"help": "the short form, every claim still judged"})
    broken: str = field(default="", metadata={"help": "break a mechanism (--break) and see its claim fail"})


@dataclass(frozen=True)
class Lesson:
    """A lesson. `observe` names the function that its job runs: `lab.observe.<module>`.

    `figures` draws the figures of a document into a folder and returns their paths. `check` raises UserError
    for parameters that cannot work, before anything starts. `seconds` is about how long (quick, full) takes
    with a cluster up on 2 cores.
    """

    name: str
    title: str
    idea: str
    needs: Needs
    observe: str
    claims: tuple[Claim, ...]
    figures: Callable[[Document, Path], list[Path]]
    params: type[Params] = Params
    default_storage: Literal["local", "s3"] = "local"
    quick: Mapping[str, Any] = field(default_factory=dict)
    breaks: tuple[Break, ...] = ()
    check: Callable[[Any], None] = lambda params: None
    measurements: Callable[[Document], Mapping[str, Any]] = lambda document: {}
    host: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    """A look from the host after the job (`lab.lessons.run.Host`); becomes the document's `host`."""
    seconds: tuple[int, int] = (30, 60)


@dataclass(frozen=True)
class LessonResult:
    """What a run of a lesson found. Written as `results/<lesson>/<run>/result.json`."""

    lesson: str
    run: str
    runtime: str
    claims: tuple[Judged, ...]
    measurements: Mapping[str, Any]
    figures: tuple[str, ...]
    files: Mapping[str, str]
    environment: Mapping[str, Any]
    params: Mapping[str, Any]
    seconds: float
    schema: int = 1

    @property
    def holds(self) -> bool:
        """Whether no claim fails. A lesson of which nothing was shown does not hold."""
        verdicts = [claim.verdict for claim in self.claims]
        return "fails" not in verdicts and "holds" in verdicts
