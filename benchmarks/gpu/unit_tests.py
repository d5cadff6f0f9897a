"""Part: the tests that need a GPU; without one all of them are skipped."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes

ROOT = Path(__file__).resolve().parents[2]


def run(record: Record, sizes: Sizes) -> None:
    """Run ``pytest -m gpu`` over the files that have such tests; failures become problems."""
    # Collecting the other files would take longer than running these.
    files = [str(p) for p in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text()]
    report = record.path.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=short", f"--junitxml={report}"]
    done = subprocess.run(command + files, cwd=ROOT, capture_output=True, text=True)
    record.expect(report.exists(), f"pytest ended with {done.returncode}: {done.stderr[-2000:]}")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    record.row("tests marked gpu", **counts)
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                record.expect(False, f"{name}: {found.get('message', '').splitlines()[0]}")
    record.expect(done.returncode == 0, f"pytest ended with {done.returncode}")
