# SPDX-License-Identifier: Apache-2.0
"""Tests small bugs in the code, one at a time, and counts those that the fast tests find: `make mutants`.

mutmut makes the bugs and runs the tests in a copy of the tree below .mutants/ (setup.cfg, hits.py). It writes all
mutants of a file into that file, and every process imports them. So one run makes only a part of the mutants. This
module chooses the part and writes the result. Results of earlier runs of the same part, with the same --only and
--tests, are kept. `--again` tests the surviving mutants again, for example after a test was added.
"""

from __future__ import annotations

import argparse
import configparser
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("dmi_connector", "tests", "pyproject.toml", "README.md")
COPIED += ("docs/*.md", "CONTRIBUTING.md")
REASONS = json.loads((ROOT / "tests/mutants/survivors.json").read_text())
"""{mutant: why it may survive}."""
FOUND = ("killed", "timeout", "segfault")
"""Statuses of mutmut for mutants that the tests detected."""


def made_name(file: str) -> str:
    """Name of the file in made/ that has the number of all mutants of a file of the tree."""
    return file.replace("/", "-")


def copy_tree(tree: Path) -> None:
    """Bring a copy of the tree up to date. mutmut makes mutants of a file again if its mtime has changed.

    The numbers of mutants in made/ of files that are gone are removed, because all numbers there are added.
    """
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", *COPIED], cwd=ROOT, text=True
    )
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source = ROOT / name
        for target in (tree / name, *([] if name.startswith("dmi_connector") else [tree / "mutants" / name])):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                shutil.copyfile(source, target)
                if name.startswith("dmi_connector"):
                    (tree / "mutants" / name).unlink(missing_ok=True)
    for folder in (tree / "dmi_connector", tree / "tests", tree / "mutants/tests"):
        for path in folder.rglob("*.py"):
            if path.relative_to(tree).as_posix().removeprefix("mutants/") not in names:
                path.unlink()
    for path in (tree / "made").iterdir():
        if path.name not in map(made_name, names):
            path.unlink()
    shutil.copyfile(ROOT / "tests/mutants/setup.cfg", tree / "setup.cfg")
    shutil.copyfile(ROOT / "tests/mutants/sitecustomize.py", tree / "mutants/sitecustomize.py")


def only_code(node: Any) -> Any:
    """mutmut's mutants of a string; none for a string with a space, because texts of messages are not mutated."""
    from mutmut.mutation import mutators

    return [] if " " in getattr(node, "value", "") else mutators.operator_string(node)


def choose(part: int, parts: int, seed: int, only: list[str]) -> None:
    """Limit mutmut to one part of each file's mutants: number `part` of `parts` equal random parts, at least one.

    Files whose path contains none of `only` get no mutants. For every other file, the number of all its mutants is
    written to made/.
    """
    from mutmut.mutation import file_mutation, mutators

    operators = [(t, only_code if f is mutators.operator_string else f) for t, f in mutators.mutation_operators]
    file_mutation.mutation_operators = operators
    create = file_mutation.create_mutations

    def chosen(filename: str, *arguments: Any) -> Any:
        module, mutations, *rest = create(filename, *arguments)
        within = [m for m in mutations if m.contained_by_top_level_function is not None]
        if not any(part in filename for part in only):
            return module, [], *rest
        Path("made", made_name(filename)).write_text(str(len(within)))
        numbers = list(range(len(within)))
        random.Random(f"{seed} {filename}").shuffle(numbers)
        mine = set(numbers[part::parts] or numbers[:1])
        return module, [m for i, m in enumerate(within) if i in mine], *rest

    file_mutation.create_mutations = chosen


def main() -> int:
    """Entry point. The exit status is 1 if less than 90 % of the mutants were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=18, help="number of parts of the mutants (default: 18)")
    parser.add_argument("--part", type=int, default=0, help="the part of this run, from 0")
    parser.add_argument("--seed", type=int, default=0, help="seed of the division into parts")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="mutants to test at the same time")
    parser.add_argument("--again", action="store_true", help="try survivors of an earlier run once more")
    parser.add_argument("--only", nargs="+", default=[""], help="only files with one of these in their path")
    parser.add_argument("--tests", nargs="+", help="tests to run instead of those in setup.cfg")
    parser.add_argument("--result", type=Path, help="where the counts go, as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    names = [*args.only, *(args.tests or ())]
    rooms = "".join("-" + name.strip("/").replace("/", ".") for name in names if name)
    tree = ROOT / ".mutants" / f"part-{args.part}-of-{args.parts}-seed-{args.seed}{rooms}"
    (tree / "mutants").mkdir(parents=True, exist_ok=True)
    (tree / "made").mkdir(exist_ok=True)
    copy_tree(tree)
    if args.tests:
        settings = configparser.ConfigParser()
        settings.read(tree / "setup.cfg")
        settings["mutmut"]["pytest_add_cli_args_test_selection"] = "\n" + "\n".join(args.tests)
        with open(tree / "setup.cfg", "w") as f:
            settings.write(f)
    os.chdir(tree)
    hits = tree / "hits"
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir()
    (hits / "test").touch()
    os.environ |= {"MUTANTS_HITS": str(hits), "PYTHONPATH": str(tree / "mutants"), "TEST_PATIENCE": "60"}
    os.environ.setdefault("S3_PYTHON", str(ROOT / ".s3/bin/python"))  # the copy of the tree has no S3 server

    from mutmut import __main__ as mutmut
    from mutmut.stats import status_by_exit_code

    choose(args.part, args.parts, args.seed, args.only)
    mutmut.set_mutant_under_test("mutant_generation")
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    try:
        mutmut.create_mutants(args.jobs)
    except BaseException:
        shutil.rmtree("mutants")  # mutmut would take half-written files for complete ones
        raise
    known, _ = mutmut.collect_source_file_mutation_data(mutant_names=[])
    if not known:
        parser.error(f"--only: no file with mutants has {' or '.join(args.only)} in its path")
    open_ = [n for _, n, code in known if code is None or (args.again and status_by_exit_code[code] not in FOUND)]
    everything = sum(int(path.read_text()) for path in Path("made").iterdir())
    print(f"{everything} mutants, {len(known)} in this part, {len(open_)} to be run", flush=True)
    if open_:
        mutmut._run(open_, args.jobs)

    _, files = mutmut.collect_source_file_mutation_data(mutant_names=[])
    counts: dict[str, dict[str, int]] = {}
    survivors: list[str] = []
    for path, data in files.items():
        for name, code in sorted(data.exit_code_by_key.items()):
            found = status_by_exit_code[code] in FOUND
            one = counts.setdefault(path, {"mutants": 0, "found": 0})
            one["mutants"] += 1
            one["found"] += found
            if not found:
                survivors.append(name)
    total = {key: sum(one[key] for one in counts.values()) for key in ("mutants", "found")}
    rate = total["found"] / total["mutants"]
    for path, one in sorted(counts.items()):
        print(f"{one['found']:5} of {one['mutants']:5}  {path}")
    print(f"{total['found']} of {total['mutants']} found: {rate:.1%}")
    Path("survivors.txt").write_text("\n".join(survivors) + "\n")
    if args.result:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        result = {
            "command": "python -m tests.mutants.run " + " ".join(sys.argv[1:]),
            "commit": commit,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            "seconds": round(time.monotonic() - began),
            "all_mutants": everything,
            **total,
            "kill_rate": round(rate, 4),
            "files": {path: one for path, one in sorted(counts.items())},
            "survivors": {name: REASONS.get(name, "no reason written") for name in survivors},
        }
        (ROOT / args.result).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0 if rate >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
