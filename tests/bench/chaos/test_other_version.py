import subprocess
import sys

from pagewire.bench._chaos.other_version import newer_package
from pagewire.shared.wire_version import WIRE_VERSION
from tests.support.waiting import PATIENCE


def test_the_copy_is_the_same_package_with_another_wire_version() -> None:
    with newer_package() as folder:
        code = "from pagewire.shared import messages; print(messages.WIRE_VERSION, messages.__file__)"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
    version, file = done.stdout.split()
    assert version == str(WIRE_VERSION + 1)
    assert file.startswith(str(folder))
