"""Part: the tests that need a GPU; without one all of them are skipped."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import ROOT, Sizes


def run(record: Record, sizes: Sizes) -> None:
    """Run ``pytest -m gpu`` over the files that have such tests; failures become problems."""
    # Collecting the other files would take longer than running these.
    files = [str(p) for p in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text()]
    if not files:  # without files pytest would collect all tests
        record.expect(False, "no test is marked gpu: this is no checkout with its tests")
        return
    report = record.path.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=short", f"--junitxml={report}"]
    done = subprocess.run(command + files, cwd=ROOT, capture_output=True, text=True)
    if not report.exists():
        said = (done.stdout + done.stderr)[-2000:]
        record.expect(False, f"pytest ended with {done.returncode} and without a report: {said}")
        return
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    record.row("tests marked gpu", **counts)
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                name = f"{case.get('classname')}::{case.get('name')}"
                record.expect(False, f"{name}: {found.get('message', '').splitlines()[0]}")
    record.expect(done.returncode == 0, f"pytest ended with {done.returncode}")
