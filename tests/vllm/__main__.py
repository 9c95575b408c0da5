"""`make test-vllm`: the tests that need vLLM, with the interpreter of `make install-vllm`.

Without one it says so, and ends well; `HYPERCAST_VLLM_PYTHON` names another.
"""

import subprocess
import sys

from tests.vllm.interpreter import find_python


def main() -> int:
    """Run the tests; return their status."""
    python = find_python()
    if python is None:
        print("skipped: vLLM is not installed; `make install-vllm` makes .venv-vllm (3.4 GB)")
        return 0
    print(f"vLLM of {python}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", "-s", "-m", "vllm", "tests/vllm"])


if __name__ == "__main__":
    sys.exit(main())
