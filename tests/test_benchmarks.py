"""Every benchmark runs, at its smallest size; what pages show of one is what its last full run measured."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys

import bare
import pytest
from conftest import ROOT

FOLDER = ROOT / "benchmarks"
# Those that are started, and not those that they import.
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if re.search(r"= record\.parse\(", path.read_text()))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a run measures, as it would be written by hand.
BY_HAND = re.compile(
    r"\d (examples/s|seconds in all)|\b\d+\.\d+x\b|\b\d+\.\d+ times\b|\b\d+ of \d+ (tied|held|points)\b"
)


@pytest.fixture
def programs(monkeypatch):
    """Imports a program by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def figures(programs):
    """The program that writes tables."""
    return programs("figures")


@pytest.mark.parametrize(
    ("typed_ones", "busy", "kept"),
    [([], 4.0, True), ([], 60.0, False), *(([one], 4.0, False) for one in ("--smoke", "--only=a", "--json=FILE"))],
)
def test_only_a_full_run_on_a_quiet_machine_takes_the_place_of_what_was_measured(
    programs, monkeypatch, typed_ones, busy, kept
):
    monkeypatch.setattr("psutil.cpu_percent", lambda seconds: busy)
    monkeypatch.setattr("sys.argv", ["reading.py", *typed_ones])
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=("a", "b"))
    assert programs("record").parse(parser, smoke=[]).kept is kept


def test_every_benchmark_has_a_table_and_every_table_a_full_run(figures):
    shown = {found["name"] for page in PAGES for found in figures.BLOCK.finditer(page.read_text())}
    assert shown == set(PROGRAMS) == set(figures.TABLES)
    assert figures.pages() == PAGES
    assert figures.not_measured(figures.RESULTS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_is_what_benchmarks_measured_and_no_figure_is_by_hand(figures, page):
    text = page.read_text()
    assert figures.filled(text, figures.RESULTS) == text, f"{page.name} is not what benchmarks say: make figures"
    assert not [found[0] for found in BY_HAND.finditer(figures.BLOCK.sub("", text))]


def test_a_table_without_a_full_run_is_named_and_stays(figures, tmp_path, monkeypatch, capsys):
    text = "<!-- figures: ties -->\nas it was\n<!-- end -->\n"
    assert figures.filled(text, tmp_path) == text
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(figures, "pages", lambda: [page])
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 1
    assert "received none. Try python benchmarks/ties.py." in capsys.readouterr().out


# Of tables that work something out, with what the pages do not have: what was not measured, and what failed.
ROWS = {
    "side_by_side": (
        {"cnn": {"claims": [
            {"claim": "mirrored / limit >= 0.85", "ratio": 0.91, "ratios": [0.9, 0.91, 1.0], "against": "limit"},
            {"claim": "one / bare-one-same >= 0.97", "ratio": None},
            {"claim": "mirrored / bare-mirrored >= 1", "ratio": 2.0, "ratios": [2.0], "against": "bare-mirrored"},
        ]}, "mlp": {"claims": [
            {"claim": "one / bare-one-same >= 0.97", "ratio": 1.2, "ratios": [1.2], "against": "bare-one-same"},
        ]}},
        [
            "| throughput of / of | cnn | mlp |",
            "| mirrored / the limit | 0.91 (0.90–1.00) |  |",
            "| one device / a bare loop | not measured | 1.20 |",
        ],
    ),
    "predict": (
        {"points": [
            {"width": 384, "workers": 1, "ratio": 1.05, "held": [True, True]},
            {"width": 512, "workers": 1, "ratio": 0.8, "held": [True, False]},
        ], "another_run": [0.04, 0.06, 0.2], "half_width": 0.151, "equal_runs_apart": 0.072},
        [
            "| workers=1 | 1 of 2 | 12.5% | 3 of 4 |",
            "| another run of the same point | 2 of 3 | 6.0% | |",
            "| intervals reach 15.1% to either side, and equal runs lie 7.2% apart (a standard deviation) | | | |",
        ],
    ),
    "deep": (
        {"ResNet50, mirrored": {"first": [[30.0, 25.0]], "step_ms": [[200.0, 250.0], [210.0, 200.0], [180.0, 200.0]]}},
        ["| ResNet50 | 1.20 | 0.90 (0.80–1.05) |"],
    ),
    "explain": (
        [
            {"case": "many", "lost": 0.5, "bound": "communication", "parts": [
                {"name": "contention", "share": 0.1}, {"name": "communication", "share": 0.4},
            ]},
            {"case": "many", "lost": 0.3, "bound": None, "parts": [
                {"name": "contention", "share": 0.1}, {"name": "communication", "share": 0.2},
            ]},
        ],
        ["| many | 40% | communication 30%, contention 10% | communication, none |"],
    ),
    "gpu": (
        {
            "device": {"kind": "NVIDIA H200", "jax": "0.10.2"},
            "checks": {"mlp: losses here / on a CPU": 2e-6, "mlp: predictions as saved / as loaded": 0.0},
            "table": {
                "transformer 100m, bfloat16": {
                    "unit": "tokens", "mfu": 0.482, "failed": {}, "peak_bytes": {"ours": 3 * 2**30, "fit": None},
                    "rates": {"ours": [900_000.0, 1_000_000.0], "fit": [1_000_000.0] * 2},
                },
                "transformer 1b, bfloat16": None,
                "ResNet-50, bfloat16": {
                    "unit": "examples", "mfu": None, "failed": {"ours": "out of memory"}, "peak_bytes": {}, "rates": {},
                },
            },
        },
        [
            "| transformer 100m, bfloat16 | 950,000 tokens | 48% | 3.0 GiB | 0.95 | failed |",
            "| transformer 1b, bfloat16 | not measured | | | | |",
            "| ResNet-50, bfloat16 | not measured | | | | |",
            "NVIDIA H200, JAX 0.10.2; its checks were 2e-06 apart at most.",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", ROWS)
def test_a_table_says_what_its_file_says_and_on_what_it_was_measured(figures, tmp_path, program):
    rows, lines = ROWS[program]
    about = {
        "benchmark": program, "arguments": ["--rounds", "2", "--json", "here.json"], "commit": "0123456789abcdef",
        "time": 0.0, "machine": {"cpu": "A CPU", "cores": 2}, "versions": {"tensorflow": "2.21.0"}, "rounds": 2,
        "rows": rows,
    }  # fmt: skip
    (tmp_path / f"{program}.json").write_text(json.dumps(about))
    made = figures.filled(f"before\n<!-- figures: {program} -->\nold\n<!-- end -->\nafter\n", tmp_path).splitlines()
    assert (made[0], made[-1]) == ("before", "after")
    assert "old" not in made
    assert set(lines) <= set(made)
    assert made[-3] == (
        f"`benchmarks/{program}.py --rounds 2`, commit 0123456789ab, 1970-01-01: A CPU, 2 cores; tensorflow 2.21.0."
    )


def test_full_runs_are_kept_with_what_they_were_run_on():
    kept = sorted((FOLDER / "results").glob("*.json"))
    assert kept
    for path in kept:
        written = json.loads(path.read_text())
        assert written["benchmark"] == path.stem
        assert "--smoke" not in written["arguments"]
        assert re.fullmatch(r"[0-9a-f]{40}", written["commit"]), "a commit without changes"


@pytest.mark.slow
def test_every_benchmark_runs_at_its_smallest_size_and_writes_what_it_measured(tmp_path):
    # `overlap.py` has a test of its own.
    programs = [program for program in PROGRAMS if program != "overlap"]
    ran = typed(tmp_path, "smoke.py", ".", *programs)
    assert ran.returncode == 0, ran.stdout + "".join(path.read_text() for path in tmp_path.glob("*.log"))
    for program in programs:
        assert (tmp_path / f"{program}.log").read_text().strip(), program
        written_by(tmp_path, program)


@pytest.mark.slow
def test_a_benchmark_compares_two_versions_as_a_person_types_it(tmp_path):
    ran = typed(tmp_path, "side_by_side.py", "--smoke", "--against", "HEAD", "--json", "side_by_side.json")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "mlp, one_device: " in ran.stdout
    written_by(tmp_path, "side_by_side")


@pytest.mark.waits
def test_overlap_is_measured_where_namespaces_can_stand_for_hosts(tmp_path):
    ran = typed(tmp_path, "overlap.py", "--smoke", "--json", "overlap.json")
    assert ran.returncode == 0, ran.stderr + ran.stdout
    rows = written_by(tmp_path, "overlap")["rows"]
    if "not_measured" in rows:
        pytest.skip(rows["not_measured"])
    assert rows["sends"].keys() == {"at the end", "in buckets"}
    assert all(row["step_ms"] > 0 and row["predicted_ms"] > 0 for row in rows["sends"].values())


@pytest.mark.slow
def test_a_bundle_has_what_a_machine_with_jax_and_nothing_else_lacks(tmp_path):
    gathered = typed(tmp_path, "gpu.py", "--bundle", "there")
    assert gathered.returncode == 0, gathered.stderr
    assert "hydra-core" in gathered.stdout
    python = bare.environment(tmp_path / "environment", bare.needed("jax"))
    ran = typed(tmp_path, "gpu.py", "--limit", "0", "--json", "out.json", python=python, root=tmp_path / "there")
    assert ran.returncode == 0, ran.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written["rows"]["table"].values()) == {None}
    assert written["versions"].keys() == {"keras", "numpy"}
    last = subprocess.run(["git", "log", "-1", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert last.stdout.startswith(written["commit"][:7])


def typed(folder, program: str, *arguments: str, python=sys.executable, root=ROOT) -> subprocess.CompletedProcess[str]:
    """A benchmark's program as a person starts it, in a folder."""
    return subprocess.run(
        [python, str(root / "benchmarks" / program), *arguments], cwd=folder,
        env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def written_by(folder, program: str) -> dict:
    """The file that a program has written in a folder: what it measured, and on what."""
    written = json.loads((folder / f"{program}.json").read_text())
    assert (written["benchmark"], written["rounds"] >= 1, written["machine"]["cores"] >= 1) == (program, True, True)
    assert all((written["rows"], written["commit"], written["versions"]["tensorflow"]))
    return written
