"""`python tests/native/sanitized_module.py MODULE [pytest arguments]`: tests with another compiled
module than the installed one, such as one built with sanitizers, whose library is preloaded (run.py)."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import pageturner.kernels

NAME = "pageturner.kernels._native"


def main() -> int:
    path, *arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    pageturner.kernels._native = module  # type: ignore[attr-defined]
    status = pytest.main(arguments)
    from pageturner.kernels.cpu import native_module

    if native_module.module() is not module:
        print("another module was tested")
        return 1
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
