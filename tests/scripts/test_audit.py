"""`make audit` never reports a failed lookup as a success. A script replaces pip-audit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOUND = {"name": "ray", "version": "2.60.0", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}
FAULT = {"id": "PYSEC-1", "aliases": ["CVE-2"], "fix_versions": ["2.14.0"], "description": "long"}
FAULTY = {"name": "torch", "version": "2.13.0", "vulns": [FAULT]}


def audit(tmp_path: Path, reports: dict[str, list[dict[str, Any]] | None]) -> "subprocess.CompletedProcess[str]":
    """Run the command with a report from each advisory service; None: the service cannot be reached."""
    script = tmp_path / "pip-audit"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\nreports = json.loads({json.dumps(json.dumps(reports))})\n"
        "given = dict(zip(sys.argv[1:], sys.argv[2:]))\n"
        "report = reports[given['--vulnerability-service']]\n"
        "if report is None:\n    sys.exit('ConnectionError: cannot resolve the name')\n"
        "open(given['--output'], 'w').write(json.dumps({'dependencies': report, 'fixes': []}))\n"
        "sys.exit(any(package.get('vulns') for package in report))\n"
    )
    script.chmod(0o700)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# remark with ==\nray==2.60.0\ntorch==2.13.0\n")
    command = [sys.executable, "scripts/audit.py", "--pip-audit", str(script)]
    options = ["--constraints", str(constraints), "--environment", str(tmp_path / "environment")]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=180)


def test_versions_without_an_advisory_are_a_success(tmp_path: Path) -> None:
    done = audit(tmp_path, {"pypi": [SOUND, SOUND | {"name": "torch"}], "osv": None})
    assert (done.returncode, "2 of 2 versions were looked up, 0 advisories" in done.stdout) == (0, True)
    assert "NOTHING IS KNOWN" not in done.stderr


@pytest.mark.parametrize(
    ("pypi", "osv", "unknown"),
    [
        (None, None, "NOTHING IS KNOWN of 2 versions: no service could be reached"),
        ([SKIPPED | {"name": "ray"}, SKIPPED], None, "NOTHING IS KNOWN of 2 versions: ray, torch"),
        ([SOUND, SKIPPED], None, "NOTHING IS KNOWN of 1 versions: torch"),
    ],
    ids=["no service", "a mirror without advisories", "one is missing"],
)
def test_a_failed_lookup_is_no_success(tmp_path: Path, pypi: Any, osv: Any, unknown: str) -> None:
    done = audit(tmp_path, {"pypi": pypi, "osv": osv})
    assert done.returncode == 2
    assert unknown in done.stderr


def test_an_advisory_of_either_service_counts(tmp_path: Path) -> None:
    done = audit(tmp_path, {"pypi": [SKIPPED | {"name": "ray"}, SKIPPED], "osv": [SOUND, FAULTY]})
    assert done.returncode == 1 and "2 of 2 versions" in done.stdout
    assert "pypi answers, but has no advisories on any of these versions" in done.stderr
