"""`isograd diff` on files that are written here, without torch."""

import json
import subprocess
import sys

import pytest

from isograd import trace_file

HEADER = {trace_file.FORMAT: trace_file.VERSION, "torch": "2.13", "settings": {"tf32": False}}


def record(kind, name, part, digest, call=0):
    return {"kind": kind, "name": name, "part": part, "call": call, "value": "float32[2]", "sha256": digest}


RECORDS = [
    record("start", "a.weight", "parameter", "00"),
    record("forward", "a", "input[0]", "11"),
    record("forward", "a", "output", "22"),
    record("backward", "a", "gradient of output", "33"),
    record("gradient", "a.weight", "gradient", "44"),
    record("gradient", "a.weight", "gradient", "55"),
    record("parameter", "a.weight", "parameter", "66"),
]
END = {"end": {"records": 7, "compiled": ["b"], "error": None}}


@pytest.fixture
def file(tmp_path):
    def write(name, *lines):
        path = tmp_path / name
        path.write_bytes(b"".join(map(trace_file.line, lines)))
        return path

    return write


def changed(number, **fields):
    return [r | fields if i == number else r for i, r in enumerate(RECORDS)]


def test_equal_traces(cli, file):
    done = cli("diff", file("a", HEADER, *RECORDS, END), file("b", HEADER | {"torch": "2.11"}, *RECORDS, END))
    assert done.exit_code == 0
    assert "The runs are the same: 7 records." in done.stdout
    assert "torch: 2.13 in a, 2.11 in b" in done.stdout
    assert "torch.compile compiled no module is seen: b" in done.stdout


def test_the_first_difference(cli, file):
    a = file("a", HEADER, *RECORDS, END)
    b = file(
        "b", HEADER | {"settings": {"tf32": True}}, *changed(2, sha256="ff")[:5], *changed(5, sha256="ff")[5:], END
    )
    done = cli("diff", a, b)
    assert done.exit_code == 1
    assert "The runs part at record 3:\n  forward: a, output\n    a: float32[2]  22\n" in done.stdout
    assert "The last record that is the same: forward: a, input[0]" in done.stdout
    assert "Of 7 records that both have 2 differ" in done.stdout
    assert "settings.tf32: False in a, True in b" in done.stdout
    assert "time 2" not in done.stdout
    assert "gradient of a parameter: a.weight, gradient, time 2" in cli("diff", a, b, "--list", 5).stdout
    found = json.loads(cli("diff", a, b, "--json").stdout)
    assert (found["same"], found["first"], len(found["differ"]), found["order"]) == (False, 3, 2, None)


def test_another_sequence_and_a_file_that_was_cut_off(cli, file):
    a = file("a", HEADER, *RECORDS, END)
    other = [*RECORDS[:1], record("forward", "c", "input[0]", "99"), *changed(4, sha256="ff")[1:], END]
    done = cli("diff", a, file("b", HEADER, *other))
    assert done.exit_code == 1
    assert "part at record 2, where they do other things:\n  a: forward: a, input[0]\n  b: forward: c" in done.stdout
    assert "0 are in a alone and 1 in b alone" in done.stdout
    assert "first with another value is:\n  gradient of a parameter: a.weight" in done.stdout
    cut = file("cut", HEADER, *RECORDS)
    cut.write_bytes(cut.read_bytes()[:-9])
    done = cli("diff", a, cut)
    assert done.exit_code == 1
    assert "cut, 6 records; the program was stopped before the block's end" in done.stdout
    assert "b: ends" in done.stdout


def test_files_that_are_no_traces(cli, file, tmp_path):
    a = file("a", HEADER, *RECORDS)
    wrong = {
        "none": None,
        "empty": b"",
        "text": b"hello\n",
        "list": b"[]\n",
        "other": b'{"a": 1}\n',
        "version": b'{"isograd_trace": 2}\n',
        "record": trace_file.line(HEADER) + b'{"kind": "forward"}\n',
    }
    for name, content in wrong.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        for arguments in ((a, path), (path, a)):
            done = cli("diff", *arguments)
            assert done.exit_code == 2
            assert done.stderr.startswith(f"isograd: '{path}'")
            assert "Traceback" not in done.stderr


def test_torch_is_not_imported(file):
    a = file("a", HEADER, *RECORDS)
    code = (
        "import sys; from isograd.cli.main import app\n"
        f"try: app(['diff', {str(a)!r}, {str(a)!r}])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("7 records.\nFalse\n")
