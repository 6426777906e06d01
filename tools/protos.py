"""Generate the wire code and check the protos.

`generate` writes `protos/gen`; `check` lints, looks for breaking changes against `protos/baseline.binpb` and compares
`protos/gen` with a fresh generation; `baseline` accepts today's protos as the baseline.
"""

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import google.rpc
import grpc_tools

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = PROTOS / "gen"
BASELINE = PROTOS / "baseline.binpb"
WHEEL = Path(next(iter(google.rpc.__path__))).parent.parent
BIN = Path(sys.executable).parent


def sources() -> list[str]:
    """Our proto files, relative to `protos/`."""
    return sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "headway").rglob("*.proto"))


def generate(into: Path) -> None:
    """Run protoc for messages, services and their type stubs."""
    into.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "grpc_tools.protoc",
        f"-I{PROTOS}", f"-I{WHEEL}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--plugin=protoc-gen-mypy={BIN / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={BIN / 'protoc-gen-mypy_grpc'}",
        f"--python_out={into}", f"--grpc_python_out={into}",
        f"--mypy_out=quiet:{into}", f"--mypy_grpc_out=quiet:{into}",
        *sources(),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    (into / "headway" / "py.typed").touch()


def stage() -> None:
    """Lay out the two modules that buf.yaml names."""
    build = ROOT / "build" / "protos"
    shutil.rmtree(build, ignore_errors=True)
    shutil.copytree(PROTOS / "headway", build / "headway" / "headway")
    rpc = build / "googleapis" / "google" / "rpc"
    rpc.mkdir(parents=True)
    shutil.copy(WHEEL / "google" / "rpc" / "status.proto", rpc)


def buf(*arguments: str) -> None:
    """Run buf in the repository."""
    subprocess.run([str(BIN / "buf"), *arguments], cwd=ROOT, check=True)


def check_fresh() -> None:
    """Fail, naming the files, when `protos/gen` is not what the protos generate."""
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        names = {str(p.relative_to(fresh)) for p in Path(fresh).rglob("*") if p.is_file()}
        ours = {
            str(p.relative_to(GENERATED)) for p in GENERATED.rglob("*") if p.is_file() and "__pycache__" not in p.parts
        }
        _, mismatch, errors = filecmp.cmpfiles(fresh, GENERATED, sorted(names & ours), shallow=False)
        stale = sorted({*mismatch, *errors, *(names ^ ours)})
    if stale:
        sys.exit("protos/gen is stale; run `make protos`:\n  " + "\n  ".join(stale))


def main(verb: str) -> None:
    """Dispatch the three verbs."""
    if verb == "generate":
        shutil.rmtree(GENERATED, ignore_errors=True)
        generate(GENERATED)
    elif verb == "check":
        stage()
        buf("lint")
        buf("breaking", "build/protos/headway", "--against", str(BASELINE.relative_to(ROOT)))
        check_fresh()
    elif verb == "baseline":
        stage()
        buf("build", "build/protos/headway", "-o", str(BASELINE.relative_to(ROOT)))
    else:
        sys.exit(f"unknown verb {verb!r}: generate, check or baseline")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
