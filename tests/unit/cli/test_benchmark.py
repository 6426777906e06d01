"""`headway bench`: the benchmarks' command line behind ours."""

import subprocess
import sys

from headway_cli.app import build
from typer.testing import CliRunner


def test_help_is_the_benchmarks():
    result = CliRunner().invoke(build(), ["bench", "envoy", "--help"])
    assert result.exit_code == 0
    assert "--prompt-bytes" in result.output


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['psutil'] = None; sys.argv[1:] = ['bench', 'envoy']"
    code += "; from headway_cli.main import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "NOT_INSTALLED: psutil is missing: pip install 'headway[bench]'" in found.stderr
