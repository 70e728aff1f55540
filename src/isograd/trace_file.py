"""The file that `isograd.torch.trace` writes and `isograd diff` reads: a header, and a line for every record.

Each line is one JSON object. The first is the header, {"isograd_trace": 1, ...}. A record has `kind` (one of `KINDS`),
`name` (of a module or parameter), `part` (of the module's call: "input", "output[0]", ...), `call` (its number among
the module's calls), `value` (type and shape), and `sha256` or, where there are no bytes to read, `unseen` with the
reason. {"end": {...}} is last; where it is missing the program was stopped. A line that was cut off is left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from isograd.errors import TraceFileError

VERSION = 1
FORMAT = "isograd_trace"
# Kinds of records, and what they are called.
KINDS = {
    "start": "before the step",
    "forward": "forward",
    "recompute": "recomputation in backward",
    "backward": "backward",
    "gradient": "gradient of a parameter",
    "step": "gradient that the optimizer was given",
    "parameter": "after the step",
    "end": "at the end",
}


class Key(NamedTuple):
    """What a record is of; the same in two runs of the same program. repeat: how many with the same came before."""

    kind: str
    name: str
    part: str
    call: int
    repeat: int = 0

    def __str__(self) -> str:
        call = f", call {self.call + 1}" if self.call else ""
        repeat = f", time {self.repeat + 1}" if self.repeat else ""
        return f"{KINDS.get(self.kind, self.kind)}: {self.name or '(no module)'}, {self.part}{call}{repeat}"


class Record(NamedTuple):
    """A record without its key: type and shape of the value, and its digest, or the reason that there is none."""

    value: str
    digest: str


@dataclass
class Trace:
    """A trace that was read. end: what its last line says, None where the program was stopped before."""

    path: Path
    header: dict[str, Any]
    records: dict[Key, Record] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    seen: Counter[Key] = field(default_factory=Counter, repr=False)

    def add(self, found: Mapping[str, Any]) -> None:
        """Add what a line says."""
        try:
            key = Key(found["kind"], found["name"], found["part"], found.get("call", 0))
            record = Record(found["value"], found.get("sha256") or found["unseen"])
        except KeyError as error:
            raise TraceFileError(f"'{self.path}' has a record without {error}") from None
        self.records[key._replace(repeat=self.seen[key])] = record
        self.seen[key] += 1


def line(fields: Mapping[str, Any]) -> bytes:
    """One line of the file."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _objects(path: Path) -> Iterable[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    return
                try:
                    found = json.loads(text)
                except ValueError:
                    found = None
                if not isinstance(found, dict):
                    raise TraceFileError(f"'{path}', line {number}, is no record of a trace")
                yield found
    except OSError as error:
        if isinstance(error, TraceFileError):
            raise
        raise TraceFileError(f"'{path}' cannot be read ({error.strerror})") from error


def read(path: Path) -> Trace:
    """Read a trace; TraceFileError for what is none, or of a version that is not known."""
    trace = None
    for found in _objects(path):
        if trace is None:
            if found.get(FORMAT) != VERSION:
                version = found.get(FORMAT)
                what = f"a trace of version {version!r}; accepted: {VERSION}" if FORMAT in found else "no trace"
                raise TraceFileError(f"'{path}' is {what}")
            trace = Trace(path, {key: value for key, value in found.items() if key != FORMAT})
        elif "end" in found:
            trace.end = found["end"]
        else:
            trace.add(found)
    if trace is None:
        raise TraceFileError(f"'{path}' is no trace: it has no header")
    return trace


# --- two traces ------------------------------------------------------------------------------------------------------
@dataclass
class Difference:
    """How two traces differ.

    header: (name, value in a, value in b) of what differs. common: the keys that both have, in a's order. differ: those
    of them whose values differ. order: the number of the first record at which the sequences themselves part, and what
    a and b have there (None after the end); None where they are one sequence. first: the number of the first record
    that differs in any way, None where none does.
    """

    header: list[tuple[str, Any, Any]]
    common: list[Key]
    differ: list[Key]
    only_a: list[Key]
    only_b: list[Key]
    order: tuple[int, Key | None, Key | None] | None
    first: int | None

    @property
    def same(self) -> bool:
        """Whether no record differs."""
        return self.first is None


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in header.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def compare(a: Trace, b: Trace) -> Difference:
    """How two traces differ."""
    theirs = _flat(b.header)
    ours = _flat(a.header)
    header = [(key, ours.get(key), theirs.get(key)) for key in ours | theirs if ours.get(key) != theirs.get(key)]
    keys_a, keys_b = list(a.records), list(b.records)
    common = [key for key in keys_a if key in b.records]
    differ = [key for key in common if a.records[key] != b.records[key]]
    order: tuple[int, Key | None, Key | None] | None = None
    if keys_a != keys_b:
        pairs = zip(keys_a, keys_b, strict=False)
        place = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(keys_a), len(keys_b)))
        x, y = [keys[place] if place < len(keys) else None for keys in (keys_a, keys_b)]
        order = place, x, y
    places = [order[0]] if order else []
    if differ:
        places.append(keys_a.index(differ[0]))
    return Difference(
        header,
        common,
        differ,
        [key for key in keys_a if key not in b.records],
        [key for key in keys_b if key not in a.records],
        order,
        min(places, default=None),
    )
