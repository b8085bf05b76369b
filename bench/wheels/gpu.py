"""Builds the wheel of the compiled GPU kernels, which `make gpu-kernels` leaves in the package.

    python bench/wheels/gpu.py [--output dist]

It holds the folder `compiled` alone, for every Python and machine, and wants the same version of pageturner.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILED = Path("pageturner/kernels/gpu/compiled")
WHEEL = "Wheel-Version: 1.0\nGenerator: pageturner\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip file: the same kernels make the same wheel


def build(source: Path, output: Path) -> Path:
    """The wheel of the kernels in a source tree. SystemExit where none were compiled."""
    folder = source / COMPILED
    files = {str(COMPILED / one.name): one.read_bytes() for one in sorted(folder.glob("*"))}
    if str(COMPILED / "manifest.json") not in files:
        raise SystemExit(f"{folder} has no compiled kernels: make gpu-kernels")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    needs = [f"pageturner=={version}", *project["optional-dependencies"]["gpu"]]
    about = f"pageturner_gpu_kernels-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: pageturner-gpu-kernels\nVersion: {version}\n"
    requires = "".join(f"Requires-Dist: {one}\n" for one in needs)
    files[f"{about}/METADATA"] = f"{head}License: Apache-2.0\n{requires}".encode()
    files[f"{about}/WHEEL"] = WHEEL.encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n".encode()
    output.mkdir(parents=True, exist_ok=True)
    made = output / f"pageturner_gpu_kernels-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, EARLIEST), data, zipfile.ZIP_DEFLATED)
    return made


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR")
    made = build(ROOT / "src", parser.parse_args().output)
    print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
