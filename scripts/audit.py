"""Look up published vulnerabilities of the versions in constraints.txt: python3 scripts/audit.py, or make audit.

pip-audit runs in an environment of its own. It prints "No known vulnerabilities found" and exits with 0 even if no lookup
succeeded, as behind a mirror without advisories. This script then exits with 2 and says so.

Exit status: 0 if every version was looked up and none has an advisory, 1 if one has, 2 if a lookup failed.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PIP_AUDIT = "pip-audit==2.10.1"
SERVICES = ("pypi", "osv")  # both have the same advisories


def main() -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-audit")
    parser.add_argument("--pip-audit", help="one that is installed already")
    options = parser.parse_args()
    command = options.pip_audit or installed_in(options.environment)
    if command is None:
        print("audit: pip-audit could not be installed. NOTHING WAS CHECKED.", file=sys.stderr)
        return 2
    best, num_wanted = None, num_pinned(options.constraints)
    for service in SERVICES:
        report = look_up(command, service, options.constraints, options.environment)
        if report is not None and (best is None or num_looked_up(report) > num_looked_up(best)):
            best = report
        if best is not None and num_looked_up(best) == num_wanted:
            break
    return tell(best, num_wanted)


def installed_in(environment: Path) -> str | None:
    """pip-audit's path in `environment`, which is created if it is missing; None if pip-audit cannot be installed."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", PIP_AUDIT], check=False
    )
    return str(environment / "bin" / "pip-audit") if done.returncode == 0 else None


def look_up(command: str, service: str, constraints: Path, directory: Path) -> dict[str, Any] | None:
    """pip-audit's report; None if the advisory service does not answer."""
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / f"report-{service}.json"
    report.unlink(missing_ok=True)
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--output", str(report)]
    done = subprocess.run(
        [command, "--vulnerability-service", service, "--requirement", str(constraints), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        loaded: dict[str, Any] = json.loads(report.read_text())
    except (OSError, ValueError):
        reason = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        print(f"audit: {service} did not answer: {reason[0][:300]}", file=sys.stderr)
        return None
    if num_looked_up(loaded) == 0:
        print(f"audit: {service} answers, but has no advisories on any of these versions", file=sys.stderr)
    return loaded


def num_looked_up(report: dict[str, Any]) -> int:
    return sum("vulns" in package for package in report["dependencies"])


def num_pinned(constraints: Path) -> int:
    return sum("==" in line for line in constraints.read_text().splitlines() if not line.startswith("#"))


def tell(report: dict[str, Any] | None, num_wanted: int) -> int:
    packages = report["dependencies"] if report is not None else []
    found = [(package, vulnerability) for package in packages for vulnerability in package.get("vulns", [])]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
        names = ", ".join([vulnerability["id"], *vulnerability.get("aliases", [])])
        print(f"{package['name']} {package['version']}: {names}; fixed in {fixed}")
    num_known = num_looked_up(report) if report is not None else 0
    print(f"audit: {num_known} of {num_wanted} versions were looked up, {len(found)} advisories found")
    if num_known < num_wanted:
        missing = ", ".join(package["name"] for package in packages if "vulns" not in package)
        print(
            f"audit: NOTHING IS KNOWN of {num_wanted - num_known} versions: {missing or 'no service could be reached'}",
            file=sys.stderr,
        )
    return 1 if found else 2 if num_known < num_wanted else 0


if __name__ == "__main__":
    sys.exit(main())
