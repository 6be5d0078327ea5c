"""Runs a project's tests inside a grader's sandbox and reports each result. Standard library only.

    python3 -I -B inside.py ROOT SOURCE < nonce

The last line of stdout is `NONCE {"ran": n, "failed": [...], "ids": "digest of all test ids"}`. The nonce arrives on
stdin: a change under test that prints a report of its own, or leaves early, has no line that counts. It doesn't stop
source that searches the interpreter it is loaded into for the nonce: no test that imports what it tests can.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import unittest
from collections.abc import Iterator


class _Result(unittest.TestResult):
    """Collects the ids of tests that didn't pass. A failing subtest fails its test."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()

    def addError(self, test: unittest.TestCase, err: object) -> None:
        self.bad.add(test.id())

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self.bad.add(test.id())

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.bad.add(test.id())

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: object) -> None:
        if err is not None:
            self.bad.add(test.id())


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _cases(item)
        else:
            yield item


def main() -> None:
    """Discover, run, report."""
    root, source = sys.argv[1:]
    nonce = sys.stdin.readline().strip()
    out = os.dup(1)
    dumps, write, digest = json.dumps, os.write, hashlib.sha256
    os.chdir(root)
    sys.path[:0] = [source, root]
    suite = unittest.TestLoader().discover("tests", top_level_dir=root)
    ids = sorted(case.id() for case in _cases(suite))
    result = _Result()
    suite.run(result)
    report = {"ran": result.testsRun, "failed": sorted(result.bad), "ids": digest("\n".join(ids).encode()).hexdigest()}
    sys.stdout.flush()
    write(out, f"\n{nonce} {dumps(report)}\n".encode())


if __name__ == "__main__":
    main()
